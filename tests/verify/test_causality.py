"""Causality checks: planted leaks, explicit masks, the cache, and what a run does with the result."""

import dataclasses
import importlib
import py_compile
import sys
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from small_gpt import VOCABULARY, Gpt, leaking_attention, micro_of, sentences
from small_models import TokenModel, ragged_tokens
from whet.base.errors import UsageError, WhetError
from whet.data.batch import MicroBatch, Padded
from whet.device.cpu import CpuDevice
from whet.device.kernels.switches import is_whet_kernel_on
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.step.attention import use_explicit_masks
from whet.verify.isolation import preserve_model_and_rng
from whet.verify.start import cache
from whet.verify.start.causality import CausalityLeak, InconclusiveError, check_causality, find_leak

pytestmark = pytest.mark.torch

UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))


def probed(model: nn.Module, outputs, micro: MicroBatch, precision: str = "fp32") -> CausalityLeak | None:
    with preserve_model_and_rng(model, CpuDevice()):
        return check_causality(model, CpuDevice(), outputs, micro, precision=precision)


# --- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_causal_model_is_causal(precision: str) -> None:
    torch.manual_seed(0)
    model = Gpt()
    assert probed(model, model.outputs, micro_of(), precision) is None


def test_planted_leak_of_one_position_in_one_bf16_head_is_found() -> None:
    torch.manual_seed(0)
    model = Gpt()
    with leaking_attention(torch.bfloat16):
        assert probed(model, model.outputs, micro_of(), "fp32") is None
        result = probed(model, model.outputs, micro_of(), "bf16")
    assert result is not None
    assert (result.position, result.changed_from) == (5, 6)
    assert "position 5" in str(result)
    assert "from position 6 on" in str(result)


def test_planted_leak_behind_zero_initialized_weights_is_found() -> None:
    """Many models start with zeros in the output projections: no output would change, whatever leaks."""
    torch.manual_seed(0)
    model = Gpt()
    for block in model.blocks:
        nn.init.zeros_(block.out.weight)
    nn.init.zeros_(model.head.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert probed(model, model.outputs, micro_of()) is None
    with leaking_attention():
        assert probed(model, model.outputs, micro_of()) is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("how", ["mean over places", "the last place", "the next place", "a wrapped roll"])
def test_planted_layers_that_mix_positions_are_found(how: str) -> None:
    torch.manual_seed(0)
    embed, out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def outputs(micro: MicroBatch) -> torch.Tensor:
        x = embed(micro.tokens)
        mixed = {
            "mean over places": lambda: x.mean(1, keepdim=True).expand_as(x),
            "the last place": lambda: x[:, -1:].expand_as(x),
            "the next place": lambda: functional.pad(x[:, 1:], (0, 0, 0, 1)),
            "a wrapped roll": lambda: x.roll(1, dims=1),
        }[how]()
        return out(x + 0.1 * mixed)

    assert find_leak(outputs, micro_of(4, length=40)) is not None
    assert find_leak(lambda micro: out(embed(micro.tokens)), micro_of(4, length=40)) is None


def test_floating_point_inputs_are_perturbed_with_noise() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    micro = MicroBatch(fields={"x": torch.randn(4, 9, 3)}, ids=np.arange(4))
    assert find_leak(lambda m: layer(m.x).cumsum(1), micro) is None
    assert find_leak(lambda m: layer(m.x).flip(1).cumsum(1).flip(1), micro) is not None


def test_padded_samples() -> None:
    torch.manual_seed(0)
    embed = nn.Embedding(31, 4)
    tokens = ragged_tokens(8, longest=12, seed=0).padded(torch.arange(8), length=12)
    micro = MicroBatch(fields={"tokens": tokens}, ids=np.arange(8))

    def causal(m: MicroBatch) -> torch.Tensor:
        return embed(m.tokens.values).cumsum(1)

    def looks_at_the_end(m: MicroBatch) -> torch.Tensor:
        x = causal(m)
        return x + x[torch.arange(8), m.tokens.lengths - 1][:, None]

    assert isinstance(tokens, Padded)
    assert find_leak(causal, micro) is None
    result = find_leak(looks_at_the_end, micro)
    assert result is not None
    assert result.position < result.changed_from


def test_packed_samples() -> None:
    torch.manual_seed(0)
    model = TokenModel()
    ragged = ragged_tokens(6, longest=9, seed=0)
    packed = ragged.packed(torch.arange(6), max_length=9, total=int(ragged.lengths.sum()))
    micro = MicroBatch(fields={"tokens": packed}, ids=np.arange(6))
    assert find_leak(lambda m: model.embed(m.tokens.values), micro) is None
    result = find_leak(lambda m: model.embed(m.tokens.values) + model.embed(m.tokens.values.roll(-1)), micro)
    assert result is not None


def test_rounding_is_not_a_leak_and_its_size_is_reported() -> None:
    embed = nn.Embedding(VOCABULARY, 4)

    def outputs(m: MicroBatch) -> torch.Tensor:
        return embed(m.tokens) + 1e-7 * embed(m.tokens).mean()

    assert find_leak(outputs, micro_of()) is None
    result = find_leak(outputs, micro_of(), tolerance=1e-12)
    assert result is not None
    assert result.change < 1e-6
    assert f"{result.change:.1e} (at most 1e-12)" in str(result)


def test_planted_nan_from_a_later_position_is_a_leak() -> None:
    def outputs(m: MicroBatch) -> torch.Tensor:
        last = (m.tokens[:, -1:] == first[:, -1:]).float()
        return functional.one_hot(m.tokens, VOCABULARY) / last[..., None] * 0

    first = micro_of().tokens
    result = find_leak(lambda m: torch.nan_to_num(outputs(m), nan=torch.nan) + m.tokens[..., None] + 1, micro_of())
    assert result is not None
    assert result.change == float("inf")


def test_inconclusive_probes_give_their_reason() -> None:
    micro = micro_of()
    with pytest.raises(InconclusiveError, match="do not depend"):
        find_leak(lambda m: torch.ones(*m.tokens.shape, 3), micro)
    with pytest.raises(InconclusiveError, match="all zero"):
        find_leak(lambda m: torch.zeros(*m.tokens.shape, 3), micro)
    with pytest.raises(InconclusiveError, match="all positions have the same input"):
        find_leak(
            lambda m: m.tokens[..., None] + 1.0,
            MicroBatch(fields={"tokens": torch.ones(2, 5).long()}, ids=np.arange(2)),
        )
    with pytest.raises(UsageError, match="one row for each position"):
        find_leak(lambda m: m.tokens.float().sum(), micro)
    with pytest.raises(UsageError, match="no input has the length of the outputs"):
        find_leak(lambda m: m.tokens[:, ::3, None].float(), micro)
    with pytest.raises(UsageError, match="must be a tensor"):
        find_leak(lambda m: (m.tokens,), micro)  # type: ignore[arg-type,return-value]


def test_chosen_start_positions() -> None:
    embed = nn.Embedding(VOCABULARY, 4)

    def the_last_place(m: MicroBatch) -> torch.Tensor:
        x = embed(m.tokens)
        return torch.cat([x[:, :5], x[:, 5:6] + x[:, 9:10], x[:, 6:]], 1)

    assert find_leak(the_last_place, micro_of(), starts=[3, 5, 10]) is None
    assert find_leak(the_last_place, micro_of(), starts=[8]) is not None


# --- masks -----------------------------------------------------------------------------------------------------------


def test_explicit_mask_gives_the_same_outputs() -> None:
    torch.manual_seed(0)
    model, micro = Gpt(), micro_of()
    expected = model.outputs(micro)
    original = functional.scaled_dot_product_attention
    with use_explicit_masks():
        result = model.outputs(micro)
        assert functional.scaled_dot_product_attention is not original
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        x = torch.randn(2, 5, 8)
        inside = layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    assert functional.scaled_dot_product_attention is original
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inside, layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0])


def test_a_module_that_is_imported_under_explicit_masks_gets_the_function_of_torch_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: Any = ModuleType("late")
    with use_explicit_masks():
        late.scaled_dot_product_attention = functional.scaled_dot_product_attention
        monkeypatch.setitem(sys.modules, "late", late)
    assert late.scaled_dot_product_attention is functional.scaled_dot_product_attention


def test_explicit_mask_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, micro, result = Gpt(), micro_of(), []
    for _ in range(2):
        model.zero_grad()
        model.loss(micro).backward()
        result.append({name: p.grad.clone() for name, p in model.named_parameters()})
        if len(result) == 1:
            masks = use_explicit_masks()
            masks.__enter__()
    masks.__exit__(None, None, None)
    for name in result[0]:
        torch.testing.assert_close(result[1][name], result[0][name], rtol=1e-4, atol=1e-6)


# --- in a run --------------------------------------------------------------------------------------------------------


def train(run: Path | None, *, is_causal: bool = True, max_steps: int = 3, overrides=None, **options):
    torch.manual_seed(0)
    model = Gpt()
    whet.train(
        model,
        sentences(64),
        loss=model.loss,
        optimizer=whet.OptimizerChoice(lr=1e-3),
        global_batch_size=8,
        max_steps=max_steps,
        epochs=4,
        run=run,
        on_event=None,
        device="cpu",
        outputs=model.outputs if is_causal else None,
        overrides={"threads": 1, **(overrides or {})},
        **options,
    )
    return model


def reported(run: Path) -> list[str]:
    return [str(event.get("message")) for event in read_events(open_run(run), kinds=("plan",))]


def value(run: Path, name: str) -> str:
    return str(open_run(run).plan["settings"][name]["value"])


def test_cpu_check_does_not_change_the_training(tmp_path: Path) -> None:
    models = [
        train(tmp_path / "on"),
        train(tmp_path / "off", overrides={"verify": "off"}),
        train(tmp_path / "none", is_causal=False),
    ]
    assert [line.rpartition("  (")[0] for line in reported(tmp_path / "on")] == ["verified: causal"]
    assert reported(tmp_path / "off") == ["not verified: verify=off"]
    assert reported(tmp_path / "none") == []
    for other in models[1:]:
        for ours, theirs in zip(models[0].state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)


def test_passed_checks_are_cached_and_damaged_entries_ignored(tmp_path: Path) -> None:
    train(tmp_path / "first")
    train(tmp_path / "second")
    assert reported(tmp_path / "second") == ["verified before: causal"]
    train(tmp_path / "always", overrides={"verify": "always"})
    assert reported(tmp_path / "always")[0].startswith("verified: causal")
    train(tmp_path / "other", overrides={"micro_batch": 4})
    assert reported(tmp_path / "other")[0].startswith("verified: causal"), "other shapes"
    train(tmp_path / "kernels", overrides={"attention": "math"})
    assert reported(tmp_path / "kernels")[0].startswith("verified: causal"), "other kernels"
    for kept in (tmp_path / "home" / "verified").iterdir():
        kept.write_text('{"found": 3')
    train(tmp_path / "damaged")
    assert reported(tmp_path / "damaged")[0].startswith("verified: causal")


def test_simulated_whet_norms_have_their_own_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the CPU claims to have such kernels, and the model claims to support them."""
    monkeypatch.setattr(CpuDevice, "has_whet_norms", True)
    monkeypatch.setattr("whet.training.executor.check_whet_norms", lambda _: None)
    train(tmp_path / "first")
    train(tmp_path / "kernels", overrides={"norms": "whet"})
    assert reported(tmp_path / "kernels")[0].startswith("verified: causal")
    train(tmp_path / "again", overrides={"norms": "whet"})
    assert reported(tmp_path / "again") == ["verified before: causal"]


def test_cache_key_changes_with_code_options_and_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = tmp_path / "written.py", cache._user_modules
    source.write_text("from torch import nn\nclass Net(nn.Linear):\n    heads = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"torch", "torch.ops", "json", "whet"}.isdisjoint(module.__name__ for module in real()), "libraries"
    monkeypatch.setattr(cache, "_user_modules", lambda: [m for m in real() if m.__name__ in ("written", "helping")])
    written = importlib.import_module("written")

    def key(model: nn.Module, functions=(), **facts: object) -> str | None:
        return cache.cache_key(facts, model, functions)

    def carrying(value: int):
        return lambda micro: value

    model = written.Net(2, 3)
    keys = [
        key(model),
        key(written.Net(2, 4)),
        key(written.Net(2, 3, bias=False)),
        key(written.Net(2, 3).double()),
        key(nn.Linear(2, 3)),
        key(model, precision="bf16"),
        key(model, (carrying(1),)),
        key(model, (carrying(2),)),
        key(model, (lambda micro: micro.x, None)),
        key(model, (lambda micro: micro.y, None)),
        key(model, (lambda micro: micro.y + 1, None)),
    ]
    for window in (5, [5], [6], {"causal": True}, {"causal": False}, SimpleNamespace(n=1), key, carrying):
        model.window = window
        keys.append(key(model))
    del model.window
    keys += [key(model, (carrying(window),)) for window in (SimpleNamespace(n=1), SimpleNamespace(n=2), [1])]
    helper = tmp_path / "helping.py"
    helper.write_text("IS_CAUSAL = True\n")
    assert key(model) == key(written.Net(2, 3)) == keys[0]
    helping = importlib.import_module("helping")
    keys.append(key(model))
    helping.IS_CAUSAL = False
    keys.append(key(model))
    helper.write_text("IS_CAUSAL = True  # written anew\n")
    keys.append(key(model))
    monkeypatch.delitem(sys.modules, "helping")
    assert key(model) == keys[0]
    source.write_text(source.read_text() + "# changed\n")
    keys.append(key(model))
    assert None not in keys
    assert len({*keys}) == len(keys)
    namespace: dict[str, object] = {"nn": nn}
    exec("class Nowhere(nn.Linear): pass", namespace)
    assert key(namespace["Nowhere"](2, 3)) is None  # type: ignore[operator]


NOTED = """
import tempfile, time, uuid
from datetime import datetime
import torch
from torch import nn
SESSION, RUN = uuid.uuid4().hex, f"run_{uuid.uuid4()}"
START, SINCE, AT = time.time(), time.perf_counter(), int(time.time() * 1000)
FOLDER, NAME = tempfile.mkdtemp(), datetime.now().strftime("mine_%Y%m%d_%H%M%S")
SCALE, HEADS, WIDTH, DATA = 0.12345, 16, 1e9, "corpus-2026-11-01"
class Net(nn.Linear): pass
def loss(micro): return None
"""


@pytest.mark.parametrize("is_compiled", [False, True])
def test_cache_key_is_the_same_in_another_process_that_notes_times_and_random_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    """Compiled: the module of the model has no source file."""
    source, real = tmp_path / "noted.py", cache._user_modules
    source.write_text(NOTED)
    if is_compiled:
        py_compile.compile(str(source), cfile=str(tmp_path / "noted.pyc"), invalidation_mode=UNCHECKED, doraise=True)
        source.unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cache, "_user_modules", lambda: [m for m in real() if m.__name__ == "noted"])

    def key(**changes: object) -> str | None:
        # Imported again, as in another process.
        monkeypatch.delitem(sys.modules, "noted", raising=False)
        noted = importlib.import_module("noted")
        model = noted.Net(2, 3)
        vars(noted).update(changes)
        model.began, model.run = noted.START, changes.get("SESSION", noted.SESSION)
        return cache.cache_key({}, model, (noted.loss,))

    first = key()
    assert first is not None
    assert key() == first
    if not is_compiled:
        others = [{"SCALE": 0.12346}, {"HEADS": 8}, {"WIDTH": 2e9}, {"DATA": "corpus-2026-11-02"}, {"SESSION": "eager"}]
        assert len({first, *(key(**changes) for changes in others)}) == 1 + len(others)


def test_losses_that_differ_in_a_captured_function_have_different_keys() -> None:
    def key(function: Any, model: nn.Module) -> str | None:
        return cache.cache_key({}, model, (lambda micro: function(model, micro),))

    model = nn.Linear(2, 3)
    first = key(lambda model, micro: model(micro).abs().mean(), model)
    assert first is not None
    assert first != key(lambda model, micro: model(micro).square().mean(), model)
    model.weight.requires_grad_(False)
    assert first != key(lambda model, micro: model(micro).abs().mean(), model)


@pytest.mark.parametrize("seconds_since_boot", [5.0, 1e6])
def test_small_numbers_are_no_clock_values(monkeypatch: pytest.MonkeyPatch, seconds_since_boot: float) -> None:
    """Simulated: a computer that slept has run for less time than this process has existed."""
    monkeypatch.setattr(cache.time, "perf_counter", lambda: seconds_since_boot)
    assert cache._serializable(1.2345) == 1.2345
    assert cache._serializable(0.0003) == 0.0003


def test_config_dataclasses_lose_what_differs_in_every_process() -> None:
    @dataclasses.dataclass
    class Config:
        run: str
        width: int = 8

    first, second = (cache._serializable(Config(run=uuid.uuid4().hex)) for _ in range(2))
    assert first == second
    assert first != cache._serializable(Config(run=uuid.uuid4().hex, width=16))


def test_each_session_is_checked(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=2, overrides={"verify": "always"})
    train(tmp_path / "run", max_steps=4, overrides={"verify": "always"})
    assert len(reported(tmp_path / "run")) == 2
    train(tmp_path / "run", max_steps=5, overrides={"verify": "off"})
    assert reported(tmp_path / "run")[2] == "not verified: verify=off", "it may change on resume"


def test_simulated_leak_falls_back_to_an_explicit_mask(tmp_path: Path) -> None:
    with leaking_attention():
        cured = train(tmp_path / "run")
        assert value(tmp_path / "run", "causal_mask") == "explicit"
        (line,) = reported(tmp_path / "run")
        assert line.startswith("the output at position 5 changes by")
        assert "causal attention has an explicit mask now: causal" in line
        train(tmp_path / "run", max_steps=5)
    assert reported(tmp_path / "run")[1].startswith("verified: causal")
    asked = train(None, overrides={"causal_mask": "explicit"})
    for ours, theirs in zip(cured.state_dict().values(), asked.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_simulated_wrong_whet_norms_fall_back_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the CPU claims to have such kernels, rules select them, and with them the model leaks."""
    monkeypatch.setattr(CpuDevice, "has_whet_norms", True)
    monkeypatch.setattr("whet.training.executor.check_whet_norms", lambda _: None)
    monkeypatch.setattr("whet.plan.rules.kernels.has_norm_kernels", lambda *_, **__: True)
    monkeypatch.setattr("whet.plan.rules.kernels.norm_kernel_reason", lambda *_, **__: "simulated")
    real = Gpt.forward

    def leaking(self: Gpt, tokens: torch.Tensor) -> torch.Tensor:
        seen = real(self, tokens)
        return seen + 0.01 * self.embed(tokens).mean((1, 2), keepdim=True) if is_whet_kernel_on("norms") else seen

    asked = train(None, overrides={"norms": "torch"})
    monkeypatch.setattr(Gpt, "forward", leaking)
    cured = train(tmp_path / "run")
    assert value(tmp_path / "run", "norms") == "torch"
    assert "norms by torch's kernels instead of whet's: causal" in reported(tmp_path / "run")[0]
    for ours, theirs in zip(cured.state_dict().values(), asked.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(WhetError, match="not causal") as refused:
        train(None, overrides={"norms": "whet"})
    assert "norms=torch instead of the norms=whet that you asked for" in str(refused.value)
    assert not is_whet_kernel_on("norms")


def test_simulated_bf16_leak_keeps_the_requested_precision(tmp_path: Path) -> None:
    with leaking_attention(torch.bfloat16):
        train(tmp_path / "run", overrides={"precision": "bf16"})
    assert (value(tmp_path / "run", "causal_mask"), value(tmp_path / "run", "precision")) == ("explicit", "bf16")


def test_planted_non_causal_model_trains_no_step(tmp_path: Path) -> None:
    class Mixer(Gpt):
        def forward(self, tokens):
            return super().forward(tokens) + 0.01 * self.embed(tokens).mean((1, 2), keepdim=True)

    torch.manual_seed(0)
    model = Mixer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = functional.scaled_dot_product_attention
    with pytest.raises(WhetError, match="the model is not causal on cpu in fp32") as caught:
        whet.train(
            model,
            sentences(64),
            loss=model.loss,
            optimizer=whet.OptimizerChoice(lr=1e-3),
            global_batch_size=8,
            run=tmp_path / "run",
            on_event=None,
            device="cpu",
            outputs=model.outputs,
        )
    assert functional.scaled_dot_product_attention is attention
    assert "the output at position" in str(caught.value)
    assert "tried without success: causal attention has an explicit mask now" in str(caught.value)
    assert "verify=off" in str(caught.value)
    assert not list(read_events(open_run(tmp_path / "run"), kinds=("step",)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_outputs_that_raise_do_not_stop_the_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gpt()

    def broken(micro: MicroBatch) -> torch.Tensor:
        raise ValueError("no logits today")

    whet.train(
        model,
        sentences(64),
        loss=model.loss,
        optimizer=whet.OptimizerChoice(lr=1e-3),
        global_batch_size=8,
        max_steps=2,
        run=tmp_path / "run",
        on_event=None,
        device="cpu",
        outputs=broken,
    )
    assert reported(tmp_path / "run")[0].startswith("causality not shown: no logits today")
    assert not (tmp_path / "home" / "verified").exists(), "inconclusive results are not cached"
