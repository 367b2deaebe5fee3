"""Known wrong results of Apple GPUs: where they apply, which warnings a plan has, and the generated page."""

import re
import subprocess
import sys

import pytest

from paths import ROOT
from whet.base.units import GB
from whet.machine.facts import Accelerator, Machine, OperatingSystem, TorchFacts
from whet.machine.known import known_machine_names, load_machine
from whet.plan.hazard_table import HAZARDS
from whet.plan.plan import make_plan, override
from whet.plan.render import plan_lines
from whet.plan.warnings import _HAZARDS_PAGE, known_hazards
from whet.plan.workload import Workload

WORKLOAD = Workload(
    recipe="any", num_parameters=1_000, global_batch_size=1_024, max_length=64, activation_bytes=1_000, layers=()
)


def mac(*, torch: str | None = "2.13.0", macos: str | None = "15.1", family: str | None = "apple8") -> Machine:
    gpu = Accelerator(kind="mps", usable_bytes=100 * GB, shares_memory=True, capability=family)
    return Machine(
        name="a Mac",
        os=OperatingSystem(name="macOS", version=macos),
        memory_bytes=128 * GB,
        accelerators=(gpu,),
        torch=TorchFacts(version=torch),
    )


def ids(machine: Machine) -> set[str]:
    return {hazard.id for hazard in known_hazards(machine, "mps")}


@pytest.mark.parametrize(
    ("hazard", "affected", "safe"),
    [
        ("linear-rows", mac(family="apple7"), mac(family="apple9")),
        ("linear-rows", mac(torch="2.13.0"), mac(torch="2.14.0")),
        ("linear-half-m5", mac(torch="2.12.1", family="apple10"), mac(torch="2.13.0", family="apple10")),
        ("linear-half-m5", mac(torch="2.12.1", family="apple10"), mac(torch="2.12.1", family="apple9")),
        ("scaler-fused", mac(torch="2.12.0"), mac(torch="2.13.0")),
        ("linear-abort-macos-27", mac(macos="27.0"), mac(macos="26.9")),
        ("linear-vector-bias", mac(macos="26.0"), mac(macos="15.6")),
        ("product-expanded", mac(torch="2.11.0", macos="26.3.1"), mac(torch="2.11.0", macos="26.4")),
        ("product-expanded", mac(torch="2.11.0", macos="15.0"), mac(torch="2.11.0", macos="14.7")),
        ("conv-weights", mac(macos="15.0"), mac(macos="14.7")),
        ("amax-int64", mac(torch="2.13.0"), mac(torch="2.12.0")),
        ("amax-int64", mac(torch="2.13.0"), mac(torch="2.14.0")),
        ("unique-counts", mac(torch="2.13.0"), mac(torch="2.14.0")),
        ("roi-align-backward", mac(torch="2.13.0"), mac(torch="2.14.0")),
        ("attention-hides-nan", mac(torch="2.13.0"), mac(torch="2.14.0")),
        ("pinned-recycled", mac(torch="2.14.1"), mac(torch="2.15.0")),
        ("pinned-recycled", mac(torch="2.14.1"), mac(torch="2.13.0")),
        ("linear-5d", mac(torch="2.15.0", macos="27.0"), mac(torch="2.15.0", macos="26.3")),
        ("product-out-slice", mac(macos="14.6"), mac(macos="15.0")),
    ],
)
def test_a_hazard_applies_by_torch_macos_and_chip(hazard: str, affected: Machine, safe: Machine) -> None:
    assert hazard in ids(affected)
    assert hazard not in ids(safe)


def test_newer_releases_of_torch_have_fewer_hazards() -> None:
    by_release = {torch: ids(mac(torch=torch)) for torch in ("2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")}
    assert [len(hazards) for hazards in by_release.values()] == [33, 29, 24, 8, 7]
    # Hazards that are open upstream apply to every release.
    assert {"bmm-large", "copy-unawaited", "batch-norm-permuted", "lstm-permuted"} <= by_release["2.15.0"]


def test_unknown_versions_count_as_affected() -> None:
    assert ids(mac(torch=None, macos=None, family=None)) == {hazard.id for hazard in HAZARDS}


def test_other_devices_have_no_hazards() -> None:
    for name in ("h200", "linux-2core"):
        plan = make_plan(load_machine(name), WORKLOAD)
        assert plan.hazards == ()
        assert not any("wrong results" in line for line in plan.warnings)
    assert make_plan(mac(), WORKLOAD, overrides={"device": "cpu"}).hazards == ()


def test_a_plan_prints_relevant_hazards_and_counts_all() -> None:
    lstm = WORKLOAD.model_copy(update={"layers": ("lstm", "linear"), "has_dropout": True})
    plan = make_plan(mac(), lstm)
    reported = "\n".join(plan_lines(plan, width=120))
    assert "the dropout of nn.LSTM is ignored in the backward pass (pytorch#190056)" in reported
    assert "conv2d" not in reported
    assert f"{len(plan.hazards)} known wrong results apply to torch 2.13.0 on this Mac" in reported
    assert _HAZARDS_PAGE in reported
    without = make_plan(mac(), WORKLOAD)
    assert not any("LSTM" in line for line in without.warnings)
    assert without.hazards == plan.hazards


@pytest.mark.parametrize("name", [name for name in known_machine_names() if name.startswith("m")])
def test_at_most_two_hazards_are_printed(name: str) -> None:
    everything = frozenset().union(*(hazard.needs for hazard in HAZARDS))
    workload = WORKLOAD.model_copy(update={"layers": tuple(sorted(everything)), "has_dropout": True})
    plan = make_plan(load_machine(name), workload, overrides={"precision": "fp16", "micro_batch": 1_024})
    assert sum("pytorch#" in line or _HAZARDS_PAGE in line for line in plan.warnings) <= 3


def test_an_override_beyond_the_row_limit_gives_a_warning() -> None:
    plan = make_plan(mac(), WORKLOAD)
    assert plan.micro_batch == 512
    assert not any("#177116" in line for line in plan.warnings)
    overridden = override(plan, {"micro_batch": 1_024})
    assert overridden.micro_batch == 1_024, "an override is kept"
    assert any("#177116" in line and "65,536; micro_batch=512" in line for line in overridden.warnings)
    assert not any("#177116" in line for line in make_plan(mac(family="apple9"), WORKLOAD).warnings)
    # A model with BatchNorm is not split, so no hint is needed.
    uncut = make_plan(mac(), WORKLOAD.model_copy(update={"has_batchnorm": True}))
    assert any("#177116" in line for line in uncut.warnings)


def test_long_sequences_on_mps_give_a_warning() -> None:
    long = WORKLOAD.model_copy(update={"max_length": 2_048})
    assert any("square of max_length=2048" in line for line in make_plan(mac(), long).warnings)
    assert not any("square" in line for line in make_plan(mac(), WORKLOAD).warnings)
    assert not any("square" in line for line in make_plan(load_machine("h200"), long).warnings)


def test_the_hazards_page_lists_every_hazard() -> None:
    page = (ROOT / _HAZARDS_PAGE).read_text()
    assert re.findall(r"^\| `([\w.-]+)` \|", page, re.MULTILINE) == [hazard.id for hazard in HAZARDS]
    assert len({hazard.id for hazard in HAZARDS}) == len(HAZARDS)
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "docs.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_rule_pages_about_mps_state_that_no_mac_was_used() -> None:
    for page in (ROOT / "docs" / "rules").glob("*-*.md"):
        text = page.read_text()
        assert ("not tested on a Mac" in text) is bool(re.search(r"\b(MPS|Metal|Macs?|Apple)\b", text)), page.name
