"""`whet prove` detects trainings that do not resume exactly, and proofs that prove nothing."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from fault_runs import ALL, BOUNDED, counts
from paths import SUPPORT
from whet.api.prove import training_from_args
from whet.base.errors import WhetError
from whet.prove import compare, kills
from whet.prove import proof as proof_module
from whet.prove.launcher import ForkLauncher, Launcher, ProcessLauncher, TrainingProcess
from whet.prove.proof import ProofRequest, prove
from whet.prove.training_process import DISK_CALLS, CountingDisk
from whet.run.disk import Disk
from whet.run.proof import (
    ComparedCounts,
    KillCounts,
    Proof,
    ProofDifference,
    proof_line,
    read_proof,
    why_insufficient,
    write_proof,
)

pytestmark = pytest.mark.torch

RECIPE = str(SUPPORT / "provable_recipe.py")
Prove = Callable[..., Proof]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkLauncher]:
    with ForkLauncher(2) as launcher:
        _, training = training_from_args(RECIPE, (), file=None, device="cpu")
        assert launcher.load(training.target, training.arguments) is None
        yield launcher


@pytest.fixture
def prove_it(forks: ForkLauncher, memory_folder: Path) -> Prove:
    def ask(*words: str, num_kills: int = 6, disk_seconds: float = 6.0, launcher: Launcher = forks) -> Proof:
        _, training = training_from_args(RECIPE, ("threads=1", *words), file=None, device="cpu")
        question = ProofRequest(
            training=training,
            recipe="provable",
            scratch=memory_folder,
            repeat="whet prove provable_recipe.py",
            log=print,
            kills=num_kills,
            seed=5,
            steps=24,
            disk_seconds=disk_seconds,
            launcher=launcher,
        )
        return prove(question)[0]

    return ask


# --- correct and incorrect trainings --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_exact_training_is_proved(prove_it: Prove, report_count: Callable[[str], None], size: str) -> None:
    proof = prove_it(num_kills={"bounded": 6, "all": 60}[size], disk_seconds={"bounded": 2.0, "all": 600.0}[size])
    assert (proof.verdict, proof.reason, proof.difference) == ("proved", None, None)
    assert proof.steps == proof.compared.losses == 24
    assert proof.compared.tensors >= 25, "weights, average, optimizer, generators"
    assert proof.at_random.resumed >= 0.6 * proof.at_random.processes
    assert proof.total.inside_save > 0
    assert proof.total.torn == 0
    assert proof.disk_calls > 40
    if size == "all":
        assert proof.at_disk_calls.kills > proof.disk_calls
    report_count(proof_line(proof))


@pytest.mark.slow
def test_new_processes_prove_the_same_as_forks(prove_it: Prove) -> None:
    """The launcher where a fork is not safe: on a GPU, and on macOS."""
    with ProcessLauncher(1) as launcher:
        assert prove_it(num_kills=4, disk_seconds=20.0, launcher=launcher).verdict == "proved"


BROKEN = {
    "randomness not saved": "tensors differ",
    "position not saved": "tensors differ",
    "average not restored": "tensors differ, ema/",
    "optimizer not saved": "tensors differ",
    "hidden state": "tensors differ",
    "written in place": "has its final name and is incomplete",
    "renamed before it is full": "has its final name and is incomplete",
    "old ones removed before the new one is there": "were reported as saved",
}
IN_GATE = {"hidden state", "written in place", "old ones removed before the new one is there"}
"""One for each way to be broken; the others take longer until a kill shows them."""


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.slow) for name in BROKEN]
)
def test_training_that_does_not_resume_exactly_is_broken(
    prove_it: Prove, report_count: Callable[[str], None], mutant: str
) -> None:
    proof = prove_it(f"mutant={mutant}", num_kills=10, disk_seconds=30.0)
    assert proof.verdict == "broken", proof
    assert proof.difference is not None
    assert BROKEN[mutant] in proof.difference.what.replace(f"of {proof.compared.tensors} ", "")
    assert proof.difference.kills
    report_count(counts(**{mutant.replace(" ", "_"): proof.difference.what}))


@pytest.mark.parametrize("mutant", ["wall clock", "random while loaded"])
def test_nondeterministic_training_cannot_be_proved(prove_it: Prove, mutant: str) -> None:
    proof = prove_it(f"mutant={mutant}")
    assert (proof.verdict, proof.reason) == ("cannot be proved", "not deterministic")
    assert proof.difference is not None
    assert proof.difference.step == 1
    assert proof.difference.tensor is not None
    assert proof.total.kills == 0


@pytest.mark.slow
def test_nondeterministic_metric_is_left_out_and_named(prove_it: Prove) -> None:
    proof = prove_it("mutant=unsteady metric", num_kills=3, disk_seconds=1.0)
    assert proof.verdict == "proved", proof
    assert "seconds" in proof.compared.left_out
    assert proof.disk_calls > 40, "a save is among the calls"


def test_training_that_fails_without_kills_is_an_error(prove_it: Prove) -> None:
    with pytest.raises(WhetError) as raised:
        prove_it("mutant=fails by itself")
    assert "fails even without kills" in raised.value.what
    assert "ValueError: no such class (provable_recipe.py:" in str(raised.value.got)
    assert raised.value.try_


# --- faults in the proof itself -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_proof_needs_kills(prove_it: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingProcess, "kill", lambda self: None)
    monkeypatch.setattr(kills, "MAX_EXTRA_KILLS", 1)
    proof = prove_it(num_kills=2)
    assert proof.verdict == "cannot be proved"
    assert "0 of 2 kills" in str(proof.reason)


def test_proof_needs_kills_at_disk_calls(prove_it: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TrainingProcess,
        "messages",
        lambda self, kind, messages=TrainingProcess.messages: [] if kind == "draft" else messages(self, kind),
    )
    proof = prove_it(num_kills=3)
    assert proof.verdict == "cannot be proved"
    assert "no kill at a disk call" in str(proof.reason)


@pytest.mark.slow
def test_proof_works_on_a_machine_that_became_busier(prove_it: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    """The durations of a machine ten times as fast: every timed kill would come before the first checkpoint."""

    def faster(life: TrainingProcess) -> kills.ProofDurations:
        durations = kills.measure_durations(life)
        tenth = {
            field.name: getattr(durations, field.name) / 10
            for field in fields(durations)
            if field.name != "draft_seconds"
        }
        return kills.ProofDurations(**tenth, draft_seconds=tuple(seconds / 10 for seconds in durations.draft_seconds))

    monkeypatch.setattr(proof_module, "measure_durations", faster)
    proof = prove_it(num_kills=4, disk_seconds=1.0)
    assert (proof.verdict, proof.reason) == ("proved", None)


@pytest.mark.slow
def test_proof_needs_resumed_processes(prove_it: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "EARLY_SHARE", 1.0)
    monkeypatch.setattr(
        proof_module,
        "measure_durations",
        lambda life: kills.ProofDurations(start_seconds=0.01, train_seconds=1.0, save_seconds=0.0),
    )
    monkeypatch.setattr(kills, "MAX_EXTRA_KILLS", 1)
    proof = prove_it(num_kills=4, disk_seconds=1.0)
    assert proof.verdict == "cannot be proved"
    assert "processes resumed from a checkpoint" in str(proof.reason)


@pytest.mark.parametrize(
    "compares",
    [
        lambda *a, **o: None,
        pytest.param(lambda *a, **o: ProofDifference(what="always"), marks=pytest.mark.slow),
    ],
    ids=["finds nothing", "always finds something"],
)
def test_comparison_without_effect_is_detected(
    prove_it: Prove, monkeypatch: pytest.MonkeyPatch, compares: Callable[..., ProofDifference | None]
) -> None:
    monkeypatch.setattr(compare, "first_difference", compares)
    assert prove_it("mutant=hidden state").verdict == "cannot be proved"


def test_reader_without_results_is_detected(prove_it: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = compare.RunResult(tensors={}, facts={}, losses={}, metrics={})
    monkeypatch.setattr(compare, "read_result", lambda run: empty)
    assert prove_it("mutant=hidden state").verdict == "cannot be proved"


def test_every_gap_in_coverage_is_named() -> None:
    good = KillCounts(kills=10, processes=12, resumed=9, inside_save=3)
    compared = ComparedCounts(tensors=5, losses=24, runs=3)
    limits = {"num_kills": 10, "steps": 24}
    assert why_insufficient(good, good, compared, **limits) is None
    assert "9 of 10 kills" in str(why_insufficient(good.model_copy(update={"kills": 9}), good, compared, **limits))
    assert "only 7 of 12" in str(why_insufficient(good.model_copy(update={"resumed": 7}), good, compared, **limits))
    assert "at a disk call" in str(why_insufficient(good, KillCounts(), compared, **limits))
    outside = good.model_copy(update={"inside_save": 0})
    assert "inside a save" in str(why_insufficient(outside, outside, compared, **limits))
    assert why_insufficient(outside, good, compared, **limits) is None
    for gap in ({"tensors": 0}, {"losses": 23}, {"runs": 0}):
        assert "compared" in str(why_insufficient(good, good, compared.model_copy(update=gap), **limits))


def test_every_disk_call_is_counted(tmp_path: Path) -> None:
    assert {"open", "write", "sync", "full_sync", "truncate", "rename", "unlink"} <= set(DISK_CALLS)
    assert all(getattr(CountingDisk, name) is not getattr(Disk, name) for name in DISK_CALLS)
    disk = CountingDisk(log=lambda *words, **fields: None)
    disk.make_folder(tmp_path / "new")
    disk.remove_folder(tmp_path / "new")
    assert disk.count == 2


# --- the record -----------------------------------------------------------------------------------------------------


def test_proof_is_written_read_and_reported(tmp_path: Path) -> None:
    proof = Proof(
        verdict="broken",
        reason="x",
        difference=ProofDifference(what="1 of 9 tensors differ", largest=float("nan"), kills="7"),
        recipe="r",
        seed=1,
        repeat="whet prove r",
        whet="0",
        created=1.0,
        at_random=KillCounts(kills=25, processes=30, resumed=24, inside_save=9),
    )
    path = write_proof(tmp_path, proof)
    assert "NaN" not in path.read_text()
    assert read_proof(tmp_path) is not None
    assert proof_line(proof) == "broken: 1 of 9 tensors differ (25 kills, 9 inside a save, 24 of 30 processes resumed)"
    good = proof.model_copy(update={"verdict": "proved", "difference": None})
    assert proof_line(good) == "proved: 25 kills, 9 inside a save, 24 of 30 processes resumed, all bits equal"
    path.write_text('{"format_version": 99}')
    with pytest.raises(WhetError, match="cannot read the proof"):
        read_proof(tmp_path)
