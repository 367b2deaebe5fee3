"""The cache of tuning results, break-even points, the memory model and evidence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.autotune import cache
from whet.autotune.batch_size import scale_learning_rate, smallest_fast_batch
from whet.autotune.cache import load, save
from whet.autotune.memory_model import MemoryModel
from whet.autotune.result import (
    NOT_QUIET,
    BreakEven,
    ConfirmedGain,
    TuningResult,
    budget_seconds,
    cuda_budget_seconds,
    finish_seconds,
    measured_settings,
)
from whet.base.errors import UsageError
from whet.base.units import GB
from whet.plan.setting import MeasuredSetting, TuneTrial

ABOUT = {"machine": "m2", "torch": "2.13.0", "model": [["Linear", 4, 4]], "shapes": {"x": [32, 4]}}
FOUND = TuningResult(
    settings={"precision": "bf16", "micro_batch": 8},
    measured={"precision": MeasuredSetting(value="bf16", reason="1.31x fp32", evidence={"interval": (1.2, 1.4)})},
    trials=(
        TuneTrial(
            setting="precision",
            settings={"precision": "bf16"},
            verdict="faster",
            note="1.31x fp32",
            repeats=8,
            median_seconds=0.1,
            interval=(1.2, 1.4),
        ),
    ),
    spent_seconds=12.5,
    summary=("2 trials",),
)


# --- the cache -------------------------------------------------------------------------------------------------------


def test_cached_result_is_found_with_any_order_of_keys(tmp_path: Path) -> None:
    assert load(ABOUT, where=tmp_path / "new") is None
    assert save(ABOUT, FOUND, where=tmp_path / "new")
    assert load(dict(reversed(ABOUT.items())), where=tmp_path / "new") == FOUND


@pytest.mark.parametrize(
    "seen",
    [{"gain": ConfirmedGain(speedup=14.06, low=3.2, high=60, repeats=8)}, {"summary": ("2 trials", NOT_QUIET)}],
    ids=["uneven", "not quiet"],
)
def test_results_of_a_busy_machine_are_not_cached(seen: dict[str, Any], tmp_path: Path) -> None:
    assert not save(ABOUT, FOUND.model_copy(update=seen), where=tmp_path)
    assert load(ABOUT, where=tmp_path) is None


@pytest.mark.parametrize("name", ABOUT)
def test_any_change_misses_the_cache(name: str, tmp_path: Path) -> None:
    save(ABOUT, FOUND, where=tmp_path)
    assert load({**ABOUT, name: "another"}, where=tmp_path) is None
    assert load({**ABOUT, "more": 1}, where=tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[" * 100_000, b"null", b'{"format_version": 1}', b"\xff\xfe", b'{"found": NaN}'],
    ids=["empty", "cut", "deep", "null", "lacking", "bytes", "nan"],
)
def test_damaged_cache_file_is_ignored_and_replaced(damage: bytes, tmp_path: Path) -> None:
    save(ABOUT, FOUND, where=tmp_path)
    path = tmp_path / f"{cache.key(ABOUT)}.json"
    path.write_bytes(damage)
    assert load(ABOUT, where=tmp_path) is None
    assert save(ABOUT, FOUND, where=tmp_path)
    assert load(ABOUT, where=tmp_path) == FOUND


@given(st.integers(0, 5_000), st.integers(0, 255))
def test_changed_byte_in_the_cache_never_raises(place: int, value: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save(ABOUT, FOUND, where=Path(folder))
        path = Path(folder) / f"{cache.key(ABOUT)}.json"
        data = bytearray(path.read_bytes())
        data[place % len(data)] = value
        path.write_bytes(data)
        actual = load(ABOUT, where=Path(folder))
        assert actual is None or isinstance(actual, TuningResult)


def test_renamed_cache_file_is_ignored(tmp_path: Path) -> None:
    save(ABOUT, FOUND, where=tmp_path)
    other = {**ABOUT, "machine": "m3"}
    (tmp_path / f"{cache.key(ABOUT)}.json").rename(tmp_path / f"{cache.key(other)}.json")
    assert load(other, where=tmp_path) is None


def test_cache_file_of_another_format_or_time_is_ignored(tmp_path: Path) -> None:
    save(ABOUT, FOUND, where=tmp_path, now=1_000_000.0)
    assert load(ABOUT, where=tmp_path, now=1_000_000.0 + 89 * 86_400) == FOUND
    assert load(ABOUT, where=tmp_path, now=1_000_000.0 + 91 * 86_400) is None
    assert load(ABOUT, where=tmp_path, now=999_999.0) is None
    path = tmp_path / f"{cache.key(ABOUT)}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))
    assert load(ABOUT, where=tmp_path, now=1_000_000.0) is None


def test_pipe_instead_of_a_cache_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{cache.key(ABOUT)}.json")
    assert load(ABOUT, where=tmp_path) is None


def test_unwritable_cache_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not save(ABOUT, FOUND, where=tmp_path / "file")


def test_missing_home_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WHET_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # As in a container whose user has no passwd entry.
    monkeypatch.setenv("HOME", "~nobody-knows-this-user")
    assert cache.load(ABOUT) is None
    assert not cache.save(ABOUT, FOUND)


def test_oldest_cache_files_are_removed_and_foreign_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_FILES", 3)
    (tmp_path / "notes.json").write_text("mine")
    os.utime(tmp_path / "notes.json", (0, 0))
    for number in range(6):
        save({"number": number}, FOUND, where=tmp_path)
        os.utime(tmp_path / f"{cache.key({'number': number})}.json", (2e9 + number, 2e9 + number))
    assert [number for number in range(6) if load({"number": number}, where=tmp_path)] == [3, 4, 5]
    assert (tmp_path / "notes.json").read_text() == "mine"


def test_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path))
    save(ABOUT, FOUND)
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "evidence"]
    assert load(ABOUT) == FOUND


# --- the objective ---------------------------------------------------------------------------------------------------


@given(cost=st.floats(0.01, 1e4), saved=st.floats(1e-6, 10), num_steps=st.integers(1, 10**6))
def test_break_even_matches_the_finish_times(cost: float, saved: float, num_steps: int) -> None:
    actual = BreakEven(cost_seconds=cost, saved_seconds=saved, num_steps=num_steps)
    plain = finish_seconds(preparation=1.0, step=20.0, num_steps=num_steps)
    other = finish_seconds(preparation=1.0 + cost, step=20.0 - saved, num_steps=num_steps)
    assert actual.step is not None
    if abs(cost - saved * num_steps) > 1e-6 * plain:
        assert actual.pays == (other < plain)
    assert saved * (actual.step + 1) > cost * (1 - 1e-9)
    assert saved * (actual.step - 1) <= cost * (1 + 1e-9)


def test_cost_without_savings_never_pays() -> None:
    never = BreakEven(cost_seconds=5.0, saved_seconds=-0.1, num_steps=1_000)
    assert (never.step, never.pays) == (None, False)
    assert "saves nothing" in never.describe("compile")


def test_run_of_unknown_length_counts_as_short() -> None:
    assert BreakEven(cost_seconds=0.1, saved_seconds=0.01, num_steps=None).pays
    unknown = BreakEven(cost_seconds=38.0, saved_seconds=0.01, num_steps=None)
    assert not unknown.pays
    assert "unknown" in unknown.describe("compile")


def test_finish_time_includes_preparation() -> None:
    assert finish_seconds(preparation=2, step=0.5, num_steps=10) == 7
    assert (budget_seconds(100), budget_seconds(10_000)) == (3.0, 60.0)
    assert budget_seconds(1e6, most=300) == 300


@pytest.mark.parametrize("run_seconds", [120, 150, 200, 499, 501, 3_000, 100_000])
def test_measuring_and_compiling_on_a_gpu_take_at_most_a_tenth_of_a_run(run_seconds: float) -> None:
    budget, compiling = cuda_budget_seconds(run_seconds)
    assert budget >= 5
    assert compiling >= 5
    assert budget + compiling <= 0.1 * run_seconds + 1e-9
    assert cuda_budget_seconds(119)[1] == 0.0


# --- memory limits ---------------------------------------------------------------------------------------------------


def test_memory_model_fits_a_line_through_measured_points() -> None:
    known = MemoryModel()
    assert known.estimate({}, micro_batch=8, predicted=None) is None
    assert known.estimate({}, micro_batch=8, predicted=GB) == GB
    known.add({}, micro_batch=8, measured=3 * GB, predicted=2 * GB)
    assert known.estimate({}, micro_batch=16, predicted=3 * GB) == 5 * GB, "the excess grows with the samples"
    assert known.estimate({}, micro_batch=16, predicted=None) == 6 * GB
    known.add({}, micro_batch=4, measured=2 * GB, predicted=GB)
    assert known.estimate({}, micro_batch=16, predicted=3 * GB) == 5 * GB
    assert known.estimate({}, micro_batch=16, predicted=100 * GB) == 5 * GB
    assert known.excess({}, micro_batch=16, predicted=3 * GB, limit=4 * GB) == "needs 5 of 4 GB"
    assert known.excess({}, micro_batch=8, predicted=3 * GB, limit=4 * GB) is None
    assert known.estimate({"precision": "bf16"}, micro_batch=8, predicted=2 * GB) == 4 * GB, (
        "other settings, other line"
    )


# --- reasons ---------------------------------------------------------------------------------------------------------


def test_reasons_list_the_losing_values_briefly() -> None:
    from whet.machine.known import load_machine
    from whet.plan.plan import make_plan
    from whet.recipes.text.config import TextConfig, describe

    plan = make_plan(load_machine("linux-2core"), describe(TextConfig()))
    trials = [
        TuneTrial(
            setting="micro_batch",
            settings={"micro_batch": 8},
            verdict="no gain",
            note="micro_batch=8 was 10 % slower here (3 repeats, spread 1 %)",
            repeats=3,
            speedup=0.91,
        ),
        TuneTrial(
            setting="micro_batch",
            settings={"micro_batch": 64},
            verdict="not tried",
            note="micro_batch=64: not tried, needs 9.1 of 5.3 GB",
        ),
    ]
    actual = measured_settings(plan, trials)
    assert actual["micro_batch"].value == plan.micro_batch
    assert actual["micro_batch"].reason == "8: 0.91x; 64: not tried, needs 9.1 of 5.3 GB"
    assert measured_settings(plan, trials[:1])["micro_batch"].reason == trials[0].note


def test_reason_and_evidence_come_from_the_same_trial() -> None:
    from whet.machine.known import load_machine
    from whet.plan.plan import make_plan
    from whet.recipes.text.config import TextConfig, describe

    plan = make_plan(load_machine("linux-2core"), describe(TextConfig()))
    trials = [
        TuneTrial(
            setting="precision",
            settings={"precision": "bf16", "micro_batch": size},
            verdict="no gain",
            note=f"slower at {size}",
            repeats=3,
            speedup=speedup,
        )
        for size, speedup in [(32, 0.6), (16, 0.7), (8, 0.5)]
    ]
    actual = measured_settings(plan, trials)["precision"]
    assert (actual.reason, actual.evidence["speedup"]) == ("slower at 16", 0.7)


# --- the knee --------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(1, 4096), st.floats(1, 1e6), min_size=1))
def test_smallest_fast_batch_is_within_a_tenth_of_the_best(points: dict[int, float]) -> None:
    (batch, fastest), best = smallest_fast_batch(points), max(points.values())
    assert points[fastest] == best
    assert points[batch] >= 0.9 * best
    assert all(rate < 0.9 * best for smaller, rate in points.items() if smaller < batch)


def test_smallest_fast_batch_needs_a_measurement() -> None:
    with pytest.raises(UsageError, match="no batch size"):
        smallest_fast_batch({8: float("nan")})


def test_learning_rate_scales_with_the_batch() -> None:
    assert scale_learning_rate(0.1, before=32, after=64, scaling="linear")[0] == pytest.approx(0.2)
    scaled, words = scale_learning_rate(1e-3, before=64, after=16, scaling="square root")
    assert scaled == pytest.approx(5e-4)
    assert "square root of 0.25" in words
