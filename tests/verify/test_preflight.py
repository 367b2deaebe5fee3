"""`whet check` finds planted flaws on their lines and reports nothing for correct models."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

import flawed_models
import sound_models
from paths import ROOT, Run
from whet.api.verify import check, load_spec
from whet.base.errors import UsageError
from whet.cli.check import render_sarif, render_text
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.verify.preflight.check import PreflightResult
from whet.verify.preflight.findings import PreflightFinding

pytestmark = pytest.mark.torch

FLAWED, SOUND = Path(flawed_models.__file__), Path(sound_models.__file__)

PLANTED = {
    "ctc": "error",
    "svd": "warning",
    "float64_buffer": "error",
    "item_in_the_loop": "warning",
    "seventeen_dimensions": "error",
    "strided_conv_weight": "warning",
    "transposed_conv_in_forward": "warning",
    "dynamic_shapes": "warning",
    "mixed_dtypes": "warning",
    "mlp_mixer": "error",
    "five_gigabytes": "error",
    "uneven_pool": "error",
    "many_rows": "warning",
    "decides_by_value": "warning",
    "host_only": "warning",
    "custom_operator": "warning",
}


def marked(name: str) -> tuple[str, int]:
    """Return the expected finding of a model and the line that is marked with it."""
    lines = FLAWED.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"def {name}("))
    for index in range(start, len(lines)):
        if actual := re.search(r"  # ([a-z0-9/-]+)$", lines[index]):
            return actual[1], index + 1
    raise AssertionError(name)


def checked(name: str, **options: object) -> PreflightResult:
    options = {"machine": "m2-air-8gb", "is_causal": name == "mlp_mixer", **options}
    return check(getattr(flawed_models, name), **options)  # type: ignore[arg-type]


@cache
def planted_check(name: str) -> PreflightResult:
    """The same for the tests that look at one result."""
    return checked(name)


def matters(actual: PreflightResult) -> set[tuple[str, int | None]]:
    return {(finding.id, finding.place.line if finding.place else None) for finding in actual.findings}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_flaws_are_found_on_their_lines(name: str) -> None:
    actual = planted_check(name)
    kind, line = marked(name)
    logged = [finding for finding in actual.findings if finding.id == kind]
    assert [finding.severity for finding in logged][:1] == [PLANTED[name]], render_text(actual)
    assert {Path(finding.place.file).name for finding in logged if finding.place} == {FLAWED.name}
    assert line in {finding.place.line for finding in logged if finding.place}
    assert actual.passes() == (PLANTED[name] != "error" and name != "decides_by_value")
    assert not actual.passes(is_strict=True)


@pytest.mark.parametrize("name", PLANTED)
def test_flawed_models_have_no_other_findings(name: str) -> None:
    also = {
        # It occurs twice: for the weight, and for the convolution that uses it.
        "strided_conv_weight": {"known-fault/conv-weights"},
        "decides_by_value": {"missing-operator"},
        "many_rows": set(),
    }
    kinds = {finding.id for finding in planted_check(name).findings}
    assert kinds <= {marked(name)[0], *also.get(name, set())}


_OF_MPS = ["ctc", "svd", "float64_buffer", "seventeen_dimensions", "uneven_pool", "many_rows"]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cuda") for name in _OF_MPS),
        *((name, "cpu") for name in _OF_MPS[:2]),
        *(pytest.param(name, "cpu", marks=pytest.mark.slow) for name in _OF_MPS[2:]),
    ],
)
def test_other_devices_do_not_have_the_limits_of_mps(name: str, device: str) -> None:
    assert not checked(name, device=device, machine=None).findings


@pytest.mark.parametrize("name", ["item_in_the_loop", "dynamic_shapes", "host_only"])
def test_host_syncs_are_reported_for_gpus_only(name: str) -> None:
    assert marked(name) in matters(checked(name, device="cuda", machine=None))
    assert not checked(name, device="cpu", machine=None).findings


def test_host_syncs_are_counted_per_step() -> None:
    [finding] = checked("item_in_the_loop").findings
    assert finding.count == 4


def test_optimizer_state_of_another_dtype_is_found() -> None:
    [finding] = [finding for finding in checked("changing_dtype").findings if finding.id == "mixed-dtypes"]
    assert finding.severity == "error"
    assert finding.during == "the optimizer's step"


def test_missing_backward_operator_names_the_forward_line() -> None:
    backward = [finding for finding in checked("ctc").findings if "backward" in finding.what]
    assert [(finding.place.line, finding.place.is_backward) for finding in backward if finding.place] == [
        (marked("ctc")[1], True)
    ]


def test_buffer_limit_depends_on_the_machine() -> None:
    assert checked("five_gigabytes").findings
    assert not checked("five_gigabytes", machine="m3-max-64gb").findings
    [finding] = checked("five_gigabytes").findings
    assert "assumed to be three quarters" in finding.what


def test_recipe_is_traced_with_the_planned_micro_batch() -> None:
    words = ["global_batch_size=4096"]
    machines = (None, "m2-air-8gb")
    anywhere, there = (check("text", words, device="mps", machine=machine, torch="2.13") for machine in machines)
    assert anywhere.num_samples == 4096
    planned = make_plan(load_machine("m2-air-8gb"), load_spec("text", words).workload).micro_batch
    assert there.num_samples == planned < 4096
    assert "known-fault/linear-rows" in {finding.id for finding in anywhere.findings}
    assert "known-fault/linear-rows" not in {finding.id for finding in there.findings}
    shown = "\n".join(render_text(there))
    assert f"micro-batch {planned}" in shown
    assert "known wrong results apply to this machine (docs/hazards.md); none was found in this model" in shown


def test_large_output_head_gets_a_suggestion() -> None:
    def large_head() -> tuple[object, ...]:
        return torch.nn.Linear(8, 40_000), (torch.randn(4, 8, requires_grad=True),)

    result = check(large_head, machine="m2-air-8gb")
    [finding] = result.findings
    assert finding.id == "known-fault/linear-rows"
    assert "sums over 40,000" in finding.what
    assert "those that affect this model are listed above" in "\n".join(render_text(result))
    assert all(way in finding.try_ for way in ("in pieces", "in chunks", "torch 2.14", "--device cpu"))


def test_attention_on_mps_is_decomposed() -> None:
    def long_attention() -> tuple[object, ...]:
        class Attention(flawed_models.Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q = self.inner(x)
                return torch.nn.functional.scaled_dot_product_attention(q, q, q)

        return Attention(), (torch.randn(1, 5, 16_384, 8),)

    kinds = {finding.id for finding in check(long_attention, machine="m2-air-8gb").findings}
    assert kinds == {"buffer-too-large", "known-fault/linear-rows", "too-little-memory"}
    assert not check(long_attention, machine="h200").findings


def test_data_dependent_model_is_traced_with_real_samples() -> None:
    actual = checked("decides_by_value")
    assert not actual.is_fake
    assert actual.num_samples == 2
    assert any("_linalg_eigh" in finding.what for finding in actual.findings)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(("mps", name) for name in ("gpt", "convnet", "lstm")),
        ("cuda", "convnet"),
        ("cpu", "lstm"),
        pytest.param("cuda", "gpt", marks=pytest.mark.slow),
        pytest.param("cuda", "lstm", marks=pytest.mark.slow),
        pytest.param("cpu", "gpt", marks=pytest.mark.slow),
        pytest.param("cpu", "convnet", marks=pytest.mark.slow),
    ],
)
def test_correct_models_have_no_findings(name: str, device: str) -> None:
    machine = {"mps": "m2-air-8gb", "cuda": "h200", "cpu": "linux-2core"}[device]
    actual = check(getattr(sound_models, name), device=device, machine=machine)
    assert actual.findings == (), render_text(actual)
    assert actual.is_fake
    assert actual.num_operators > 100


# Small models are traced in the same way, and huge ones are estimated without memory in test_memory_estimate.py.
@pytest.mark.slow
def test_large_model_is_traced_without_memory() -> None:
    actual = check(sound_models.gpt_350m, machine="m3-max-64gb")
    assert actual.num_parameters > 350_000_000
    assert actual.is_fake
    assert actual.findings == ()


def test_a_causal_model_is_causal() -> None:
    actual = check(sound_models.causal_gpt, is_causal=True)
    assert not actual.findings
    assert actual.is_causal
    assert any(line.startswith("causal    yes") for line in render_text(actual))
    assert checked("mlp_mixer").is_causal is False
    assert check(sound_models.causal_gpt).is_causal is None


def test_torch_generator_is_restored() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    checked("decides_by_value")
    assert torch.equal(torch.get_rng_state(), before)


def test_exception_of_the_model_is_raised() -> None:
    def broken() -> tuple[object, ...]:
        return torch.nn.Linear(8, 8), (torch.randn(4, 9),)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check(broken)


BROKEN = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding({rows}, 64), torch.nn.Linear(63, 2)
    def forward(self, tokens):
        return self.head(self.table(tokens))
def model():
    return Net(), (torch.zeros(2, 3, dtype=torch.long),)
"""


@pytest.mark.parametrize("rows", [100, 1_000_000])
def test_failure_of_the_model_is_an_error_whatever_its_size(rows: int, warm_whet: Run, tmp_path: Path) -> None:
    """A large model runs with fake tensors only, so that its own failure ends the trace."""
    (tmp_path / "mine.py").write_text(BROKEN.format(rows=rows))
    done = warm_whet("check", "mine.py")
    assert done.returncode == 1, done.stdout + done.stderr
    shown = done.stdout + done.stderr
    assert "mine.py:8" in shown, "the user's line"
    assert "linear.py:" in shown, "the line that raised"
    assert "64" in shown, "torch's own words"


def test_command_prints_every_format(warm_whet: Run, tmp_path: Path) -> None:
    word, machine = f"{FLAWED}:ctc", ("--machine", "m2-air-8gb")
    text = warm_whet("check", word, *machine)
    assert text.returncode == 1
    assert f"{FLAWED}:{marked('ctc')[1]}" in text.stdout
    assert "MPS has no operator aten::_ctc_loss" in text.stdout

    findings = json.loads(warm_whet("check", word, *machine, "--json").stdout)["findings"]
    assert [PreflightFinding.model_validate(finding).id for finding in findings] == ["missing-operator"] * 2

    sarif = json.loads(warm_whet("check", word, *machine, "--sarif").stdout)
    result = sarif["runs"][0]["results"][0]
    assert result["level"] == "error"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == marked("ctc")[1]


@pytest.mark.slow
def test_warnings_fail_only_with_strict(warm_whet: Run) -> None:
    word = f"{FLAWED}:item_in_the_loop"
    assert warm_whet("check", word).returncode == 0
    assert warm_whet("check", word, "--strict").returncode == 1
    assert warm_whet("check", word, "--for", "cpu", "--strict").returncode == 0


def test_a_finding_of_two_lines_stays_whole() -> None:
    actual = checked("item_in_the_loop")
    odd = actual.findings[0].model_copy(update={"what": "100 %\nof it"})
    other = actual.model_copy(update={"findings": (odd,)})
    assert render_sarif(other)["runs"][0]["results"][0]["message"]["text"].startswith("100 %\nof it")


def test_every_sarif_result_has_a_location() -> None:
    actual = checked("item_in_the_loop")
    homeless = actual.findings[0].model_copy(update={"place": None, "during": "the step"})
    (result,) = render_sarif(actual.model_copy(update={"findings": (homeless,)}))["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith(".py")
    assert place["region"]["startLine"] > 0


def test_contradictory_options_are_errors(warm_whet: Run) -> None:
    done = warm_whet("check", "text", "--for", "mps", "--machine", "h200")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the machine has no such device")
    with pytest.raises(UsageError, match="does not return the outputs of its model"):
        check("text", is_causal=True)
    with pytest.raises(UsageError, match="must build the model itself"):
        check(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_text_recipe_has_no_findings(warm_whet: Run) -> None:
    done = warm_whet("check", "text", "arch.layers=1", "--machine", "m2-air-8gb", "--strict")
    assert done.returncode == 0, done.stdout
    assert "result    no findings" in done.stdout


def test_factory_of_any_name_may_return_a_recipe(warm_whet: Run, tmp_path: Path) -> None:
    assert warm_whet("init", "mine.py").returncode == 0
    source = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(source + "\n\ndef another_name():\n    return recipe()\n")
    done = warm_whet("check", "mine.py:another_name", "hidden_size=16", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_commands_of_the_docs_page_run(warm_whet: Run) -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    commands = re.findall(r"^\$ whet (.*?)(?:\s+# (?:exit code (\d))?.*)?$", page, re.MULTILINE)
    assert len(commands) > 4
    for command, code in commands:
        done = warm_whet(*shlex.split(command), cwd=ROOT)
        assert done.returncode == int(code or 0), command + done.stdout + done.stderr
