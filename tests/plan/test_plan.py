"""Plans: golden files for the known machines, and invariants of every plan."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.base.errors import UsageError, WhetError
from whet.base.units import GB
from whet.machine.facts import Accelerator, CpuFacts, Machine, OperatingSystem, SystemState, TorchFacts
from whet.machine.known import example_machine_names, load_machine
from whet.plan.kernel_support import SHORT_ROTARY_ATTENTION, SPAN_ATTENTION
from whet.plan.memory import predict_memory
from whet.plan.plan import Plan, make_plan, override, read_plan, with_smaller_micro_batch
from whet.plan.render import explain_setting
from whet.plan.rules import ALL_RULES
from whet.plan.setting import MeasuredSetting, Scalar
from whet.plan.values import SETTING_NAMES
from whet.plan.workload import Workload
from whet.recipes.chat.config import ChatConfig, describe_chat
from whet.recipes.hex.config import HexConfig, describe_hex
from whet.recipes.puzzle.config import PuzzleConfig
from whet.recipes.puzzle.config import describe as describe_puzzle
from whet.recipes.text.config import TextConfig, describe

GOLDEN = Path(__file__).parent.parent / "golden" / "plans"
TEXT = describe(TextConfig())
BERT = Workload(
    recipe="text",
    num_parameters=109_482_240,
    global_batch_size=32,
    num_samples=7_320,
    num_steps=687,
    max_length=128,
    lengths_vary=True,
    sample_bytes=1_032,
    activation_bytes=12 * (66 * 128 * 768 + 9 * 12 * 128**2),
    has_dropout=True,
)


def mac(*, usable_gb: float = 5.33, family: str = "apple8", torch: str = "2.13.0") -> Machine:
    return Machine(
        name="a Mac",
        os=OperatingSystem(name="macOS", version="15.1"),
        cpu=CpuFacts(fast_cores=4, slow_cores=4),
        memory_bytes=8 * GB,
        accelerators=(
            Accelerator(kind="mps", usable_bytes=int(usable_gb * GB), shares_memory=True, capability=family),
        ),
        torch=TorchFacts(version=torch),
    )


@pytest.mark.parametrize("name", example_machine_names())
@pytest.mark.parametrize("workload", [TEXT, BERT], ids=["text", "bert"])
def test_golden_plans(name: str, workload: Workload, request: pytest.FixtureRequest) -> None:
    """Rewrite them with `WHET_REWRITE_GOLDEN=1 make test` and read the difference before committing it."""
    plan = make_plan(load_machine(name), workload)
    made = {
        "settings": plan.as_json()["settings"],
        "warnings": list(plan.warnings),
        "hazards": list(plan.hazards),
    }
    path = GOLDEN / f"{request.node.callspec.id}.json"
    if os.environ.get("WHET_REWRITE_GOLDEN"):
        path.write_text(json.dumps(made, indent=1) + "\n")
    assert json.loads(path.read_text()) == made


def test_every_setting_has_a_reason_on_every_known_machine() -> None:
    for name in example_machine_names():
        for setting in make_plan(load_machine(name), TEXT).settings.values():
            assert setting.reason
            assert setting.source == "rule"
            assert setting.evidence["rule"]
            assert len(setting.evidence) > 1, "a rule names the facts it used"


def test_an_m2_air_and_an_h200_differ_for_stated_reasons() -> None:
    air, h200 = (make_plan(load_machine(name), BERT).settings for name in ("m2-air-8gb", "h200"))
    different = {name for name in air if air[name].value != h200[name].value}
    assert {"device", "precision", "memory_gb", "lengths", "high_watermark", "empty_cache"} <= different
    for name in different:
        assert air[name].reason != h200[name].reason


def test_half_precision_on_cuda_packs_to_few_totals_and_captures() -> None:
    machine = load_machine("h200")
    bert = BERT.model_copy(update={"can_pack": True, "lengths_vary": True, "num_steps": 5_000})

    def ways(workload: Workload = bert, machine: Machine = machine, **overrides: Scalar) -> tuple[Scalar, Scalar]:
        plan = make_plan(machine, workload, overrides={"precision": "bf16", **overrides})
        return plan.graph, plan.lengths

    assert ways() == ("on", "packed_bucketed")
    assert ways(precision="fp16") == ("on", "packed_bucketed")
    assert ways(graph="off") == ("off", "packed")
    assert ways(graph="off", compile="on") == ("off", "packed_bucketed")
    # Float32 and older versions of torch have no such kernel, and some models do not accept packed samples.
    assert ways(precision="tf32") == ("off", "sorted")
    assert ways(bert.model_copy(update={"can_pack": False})) == ("off", "sorted")
    assert ways(bert.model_copy(update={"num_steps": 20})) == ("off", "packed")
    older = machine.torch.model_copy(update={"version": "2.9.1"})
    assert ways(machine=machine.model_copy(update={"torch": older})) == ("off", "sorted")
    assert ways(device="cpu") == ("off", "packed")


def test_whet_group_norms_use_channels_last() -> None:
    machine = load_machine("h200")

    def ways(machine: Machine = machine, config: HexConfig | None = None, **overrides: Scalar) -> tuple[Scalar, Scalar]:
        workload = describe_hex(config or HexConfig(size=13))
        plan = make_plan(machine, workload, overrides={"precision": "bf16", **overrides})
        return plan.layout, plan.norms

    assert ways() == ways(precision="fp16") == ("channels_last", "whet")
    assert ways(layout="contiguous") == ("contiguous", "torch")
    assert ways(norms="torch") == ("channels_last", "torch")
    older = tuple(gpu.model_copy(update={"capability": "8.0"}) for gpu in machine.accelerators)
    neither = ("contiguous", "torch")
    assert ways(precision="tf32") == ways(device="cpu") == neither
    assert ways(machine.model_copy(update={"accelerators": older})) == neither
    for arch in ({"activation": "gelu"}, {"width": 48}):
        assert ways(config=HexConfig(size=13, arch=arch)) == neither, arch
    plain = ways(config=HexConfig(size=13, arch={"norm": "batch"}))
    assert plain == ("channels_last", "torch"), "convolutions without torch's group norms"
    assert ways(machine.model_copy(update={"accelerators": older}), norms="whet")[1] == "whet", "asked for"


def test_whet_add_norms_need_half_precision_and_capability_9() -> None:
    machine = load_machine("h200")
    older = tuple(gpu.model_copy(update={"capability": "8.0"}) for gpu in machine.accelerators)

    def norms(workload: Workload, machine: Machine = machine, **overrides: Scalar) -> Scalar:
        return make_plan(machine, workload, overrides={"precision": "bf16", **overrides}).norms

    bert, chat = (
        TextConfig(model="bert-base-uncased"),
        describe_chat(ChatConfig(), vocab_size=500, longest=100, num_rows=1_000),
    )
    for workload in (describe(bert), chat, describe_puzzle(PuzzleConfig())):
        assert norms(workload) == norms(workload, precision="fp16") == "whet", workload.recipe
        assert norms(workload, precision="tf32") == norms(workload, device="cpu") == "torch"
        assert norms(workload, machine.model_copy(update={"accelerators": older})) == "torch"
    for without in (TextConfig(), TextConfig(model="bert-base-uncased", lora=8)):
        assert norms(describe(without)) == "torch", "these belong to another model"


def test_a_model_with_one_shape_and_many_small_kernels_is_captured() -> None:
    def graph(layers: tuple[str, ...] | None = None, **changes: object) -> Scalar:
        workload = describe_hex(HexConfig(size=13)).model_copy(update={"num_steps": 500, **changes})
        workload = workload if layers is None else workload.model_copy(update={"layers": layers})
        return make_plan(load_machine("h200"), workload).graph

    assert graph() == "on"
    documents = ("attention", "linear", SPAN_ATTENTION)
    assert graph(layers=documents) == "on", "rows of several documents each"
    assert graph(layers=documents, lengths_vary=True) == "off"
    chat = describe_chat(ChatConfig(), vocab_size=500, longest=100, num_rows=10_000)
    why = make_plan(load_machine("h200"), chat).settings["graph"].reason
    assert why == "one shape: in a graph no kernel waits for its launch", "no cost dominates there"
    assert graph(num_steps=49) == graph(world_size=2) == "off"
    other = {"layers": ("conv", "conv2d", "linear")}
    assert graph(**other) == "launch_bound", "its first steps decide"
    assert graph(**other, num_steps=49) == graph(**other, optimizer_obstacle="Lion has no fused kernels") == "off"


def test_whet_attention_needs_capability_9() -> None:
    machine = load_machine("h200")
    older = tuple(gpu.model_copy(update={"capability": "8.9"}) for gpu in machine.accelerators)
    short = TEXT.model_copy(update={"layers": ("attention", SHORT_ROTARY_ATTENTION)})

    def attention(where: Machine, **overrides: Scalar) -> Scalar:
        return make_plan(where, short, overrides={"precision": "bf16", **overrides}).attention

    elsewhere = machine.model_copy(update={"accelerators": older})
    assert attention(machine) == attention(elsewhere, attention="whet") == "whet"
    assert attention(elsewhere) != "whet"


def test_whet_span_attention_needs_packed_lengths(tmp_path: Path) -> None:
    machine = load_machine("h200")
    bert = {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps(bert))

    def text(**config: Any) -> Workload:
        return describe(TextConfig(**config)).model_copy(update={"num_samples": 10_000, "num_steps": 1_000})

    def attention(workload: Workload, **overrides: Scalar) -> Scalar:
        return make_plan(machine, workload, overrides={"precision": "bf16", **overrides}).attention

    chat = describe_chat(ChatConfig(arch={"preset": "medium"}), vocab_size=8_192, longest=512, num_rows=2_048)
    assert attention(chat) == attention(text()) == "whet"
    assert attention(text(model=str(tmp_path), attention_dropout=0)) == "whet"
    assert attention(text(model=str(tmp_path))) == "torch", "attention has dropout there"
    assert attention(text(), lengths="sorted") == "flash"
    assert attention(chat, precision="tf32") == "torch"
    wide = describe_chat(ChatConfig(arch={"preset": "medium", "num_heads": 8}), vocab_size=9, longest=512, num_rows=64)
    assert attention(wide) == "torch", "heads of 128"


def test_overrides_precede_measurements_and_measurements_precede_rules() -> None:
    measured = {"precision": MeasuredSetting(value="bf16", reason="1.3x fp32", evidence={"repeats": 5, "median": 0.1})}
    plan = make_plan(mac(), TEXT, measured=measured)
    assert (plan.precision, plan.settings["precision"].source) == ("bf16", "measured")
    assert plan.settings["precision"].evidence["repeats"] == 5
    plan = override(plan, {"precision": "fp16"})
    assert (plan.precision, plan.settings["precision"].source) == ("fp16", "you")
    assert plan.loss_scaling == "dynamic", "settings that depend on an override are decided again"
    assert plan.settings["precision"].evidence["rule_value"] == "fp32"


def test_a_plan_survives_json() -> None:
    plan = make_plan(mac(), TEXT, overrides={"micro_batch": 3})
    text = json.dumps(plan.as_json(), allow_nan=False)
    assert read_plan(json.loads(text), where="here") == plan


def test_a_plan_of_a_newer_format_is_rejected() -> None:
    data = {**make_plan(mac(), TEXT).as_json(), "format_version": 99}
    with pytest.raises(WhetError, match="newer whet"):
        read_plan(data, where="plan.json")


@pytest.mark.parametrize("damage", [3, [], {"settings": {}}, None])
def test_a_corrupt_plan_is_rejected(damage: object) -> None:
    with pytest.raises(UsageError, match=r"plan\.json"):
        read_plan(damage, where="plan.json")


def test_unknown_settings_are_rejected_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="micro_batch"):
        make_plan(mac(), TEXT, overrides={"micro_bach": 3})
    with pytest.raises(UsageError, match="precision"):
        explain_setting(make_plan(mac(), TEXT), "precison")


def test_a_missing_device_is_rejected_with_a_fix() -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(load_machine("linux-2core"), TEXT, overrides={"device": "mps"})
    assert "mps" in caught.value.what
    assert caught.value.try_


def test_a_device_index_does_not_change_the_decisions() -> None:
    plan = make_plan(load_machine("h200"), TEXT, overrides={"device": "cuda:0"})
    assert plan.device == "cuda:0"
    assert plan.precision == "tf32"


def test_rows_on_m1_and_m2_stay_below_the_limit() -> None:
    big = TEXT.model_copy(update={"global_batch_size": 4_096})
    for family, torch, is_capped in (
        ("apple7", "2.13.0", True),
        ("apple8", "2.13.0", True),
        ("apple9", "2.13.0", False),
        ("apple8", "2.14.0", False),
        ("apple8", "unknown", True),
    ):
        plan = make_plan(mac(usable_gb=500, family=family, torch=torch), big)
        micro = plan.micro_batch
        assert isinstance(micro, int)
        assert (micro * big.max_length <= 32_768) is is_capped, (family, torch)


def test_splitting_a_batch_with_batchnorm_gives_a_warning() -> None:
    convnet = BERT.model_copy(update={"has_batchnorm": True, "global_batch_size": 512})
    plan = make_plan(mac(), convnet)
    assert plan.micro_batch == 512
    assert plan.activation_checkpointing == "on"
    cut = override(plan, {"micro_batch": 16})
    assert any("BatchNorm" in line for line in cut.warnings)


def test_free_memory_bounds_the_plan_on_shared_memory_only() -> None:
    busy = SystemState(memory_available_bytes=2 * GB)
    assert make_plan(mac(), TEXT, system_state=busy).memory_gb == 2.0
    assert make_plan(load_machine("h200"), TEXT, system_state=busy).memory_gb > 100


def test_a_graph_on_a_device_without_graphs_gives_a_warning() -> None:
    for machine, is_warned in ((mac(), True), (load_machine("h200"), False)):
        plan = make_plan(machine, TEXT, overrides={"graph": "on"})
        assert any("cannot capture steps" in line for line in plan.warnings) is is_warned


def test_bf16_on_a_cpu_without_it_gives_a_warning() -> None:
    for has_bf16, is_warned in ((False, True), (None, True), (True, False)):
        plan = make_plan(Machine(name="a PC", cpu=CpuFacts(has_bf16=has_bf16)), TEXT, overrides={"precision": "bf16"})
        assert plan.precision == "bf16", "an override is kept"
        assert any("60 to 100 times slower" in line for line in plan.warnings) is is_warned


def test_fused_kernels_with_fp16_need_torch_2_13_on_mps() -> None:
    overrides = {"precision": "fp16"}
    assert make_plan(mac(torch="2.12.0"), TEXT, overrides=overrides).optimizer_kernels == "loop"
    assert make_plan(mac(torch="2.13.0"), TEXT, overrides=overrides).optimizer_kernels == "fused"


def test_adagrad_keeps_its_kernels_where_torch_has_no_fused_ones() -> None:
    adagrad = TEXT.model_copy(update={"optimizer": "Adagrad"})
    assert make_plan(mac(), adagrad).optimizer_kernels == "yours"
    gpu = load_machine("h200")
    kernels = {
        version: make_plan(gpu.model_copy(update={"torch": TorchFacts(version=version)}), adagrad).optimizer_kernels
        for version in ("2.11.0", "2.13.0")
    }
    assert kernels == {"2.11.0": "yours", "2.13.0": "fused"}


def test_an_unknown_machine_gets_a_conservative_plan() -> None:
    plan = make_plan(Machine(name="unknown"), TEXT)
    assert plan.device == "cpu"
    assert plan.memory_gb is None
    assert plan.micro_batch == 8
    assert plan.threads is None


def test_explain_includes_the_documentation_of_the_rule() -> None:
    text = explain_setting(make_plan(mac(), TEXT), "micro_batch")
    for part in ("rule M3", "Why:", "When wrong:", "Override: micro_batch=N", "Sources:"):
        assert part in text
    narrow = explain_setting(make_plan(mac(), TEXT), "micro_batch", width=60)
    assert max(len(line) for line in narrow[narrow.index("\nrule M3") :].splitlines()) <= 60


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_batch", 0),
        ("micro_batch", 2.5),
        ("micro_batch", True),
        ("precision", "fp8"),
        ("keep_checkpoints", 1),
        ("memory_gb", -1),
        ("device", "tpu"),
        ("lengths", "short"),
        ("threads", "two"),
        ("checkpoint_minutes", 0),
    ],
)
def test_an_invalid_override_is_rejected(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name} must be"):
        make_plan(mac(), TEXT, overrides={name: value})


def test_rule_ids_and_settings_are_unique() -> None:
    assert len({rule.id for rule in ALL_RULES}) == len(ALL_RULES)
    assert [rule.setting for rule in ALL_RULES] == list(SETTING_NAMES)


_workloads = st.builds(
    Workload,
    recipe=st.just("any"),
    num_parameters=st.integers(1, 10**10),
    global_batch_size=st.integers(1, 5_000),
    num_samples=st.none() | st.integers(1, 10**7),
    max_length=st.integers(1, 5_000),
    lengths_vary=st.booleans(),
    sample_bytes=st.none() | st.integers(1, 10**6),
    activation_bytes=st.none() | st.integers(1, 10**9),
    needs_decoding=st.booleans(),
    has_dropout=st.booleans(),
    has_batchnorm=st.booleans(),
)


@given(_workloads, st.sampled_from([*example_machine_names(), "nothing"]))
def test_any_workload_gets_a_valid_plan(workload: Workload, name: str) -> None:
    plan = make_plan(Machine(name="nothing") if name == "nothing" else load_machine(name), workload)
    micro, cuts, limit = plan.micro_batch, plan.accumulation, plan.memory_gb
    assert isinstance(micro, int)
    assert isinstance(cuts, int)
    assert 1 <= micro <= workload.global_batch_size
    assert (cuts - 1) * micro < workload.global_batch_size <= cuts * micro
    assert Plan.from_json(json.loads(json.dumps(plan.as_json())), where="memory") == plan
    needed = predict_memory(
        workload,
        micro_batch=micro,
        device=plan.device,
        precision=plan.precision,
        is_checkpointed=plan.activation_checkpointing == "on",
    )
    if needed is not None and isinstance(limit, float) and needed > limit * GB:
        assert micro == 1 or workload.has_batchnorm, "a micro-batch that does not fit is never planned"
        assert any("more than" in line for line in plan.warnings), "a model that does not fit is reported"


@pytest.mark.parametrize(("num_processes", "micro_batch"), [(1, 34), (2, 25)])
def test_a_smaller_micro_batch_splits_the_share_of_a_process_evenly(num_processes: int, micro_batch: int) -> None:
    """With two processes, each has 50 of 100 samples: 25 + 25, not 34 + 16."""
    workload = TEXT.model_copy(
        update={"global_batch_size": 100, "world_size": num_processes, "local_size": num_processes}
    )
    plan = make_plan(load_machine("linux-2core"), workload, overrides={"device": "cpu"})
    smaller = with_smaller_micro_batch(plan, 40, reason="out of memory", problem="out of memory")
    assert smaller.micro_batch == micro_batch
