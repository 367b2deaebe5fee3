"""The text report: within its width, without control characters, with every spike and gap of a curve."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.report.evaluation import Evaluation
from whet.report.plan_evidence import ReportSetting
from whet.report.run_report import Incident, Provenance, RunReport, SavedCheckpoint
from whet.report.text import MIN_WIDTH, render_text
from whet.report.text_chart import draw_curve
from whet.report.timeline import SessionSpan
from whet.report.tracks import PhaseTime, Track, TrackLine
from whet.run.curve import Curve, CurvePoint


def curve_from_values(values: dict[int, float], *, field: str) -> Curve:
    """A curve of single values by step."""
    points = []
    for step, value in sorted(values.items()):
        known = value if math.isfinite(value) else None
        points.append(CurvePoint(step=step, low=known, high=known, mean=known, nonfinite=int(known is None)))
    return Curve(field=field, points=tuple(points), last_step=max(values, default=0))


SETTINGS = (
    ReportSetting(name="device", value="mps", reason="6.1x the CPU; 199 gradients agree with it", source="measured"),
    ReportSetting(name="micro_batch", value=16, reason="", source="you", evidence={}),
    ReportSetting(name="workers", value="unused", reason="nothing to load", source="rule", evidence={"rule": "L1"}),
    ReportSetting(
        name="lengths",
        value="sorted, 4 shapes",
        reason="31 % padding instead of 64 %; the step's samples stay the same",
        source="rule",
        evidence={"rule": "M3"},
    ),
)


def phases(seconds: dict[str, float]) -> tuple[PhaseTime, ...]:
    total = sum(seconds.values())
    return tuple(PhaseTime(name=n, seconds=s, share=s / total, note="") for n, s in seconds.items())


def report(**changes: Any) -> RunReport:
    steps = tuple(range(1, 101))
    loss = TrackLine(name="loss", mean=tuple(1 / step for step in steps))
    track = Track(source="step", step=steps, seconds=(0.0,) * 100, samples=(None,) * 100, lines=(loss,))
    values: dict[str, Any] = {
        "path": Path("/runs/text-001"),
        "name": "text-001",
        "recipe": "text",
        "state": "stopped",
        "created": 1000.0,
        "whet": "0.1.0",
        "step": 100,
        "total_steps": 687,
        "epoch": 2.0,
        "samples": 3200,
        "wall_seconds": 840.0,
        "training_seconds": 840.0,
        "sessions": (SessionSpan(started=0.0, ended=840.0, step=0, begins_at=0.0),),
        "first_loss": 1.0,
        "loss": 0.01,
        "best_loss": 0.01,
        "best_loss_step": 100,
        "tracks": (track,),
        "evaluations": tuple(Evaluation(step=s, time=1.0, metrics={"accuracy": s / 100}) for s in (50, 100)),
        "goal": "accuracy",
        "goal_value": 1.0,
        "best_goal": 1.0,
        "best_goal_step": 100,
        "settings": SETTINGS,
        "machine": "Apple M2, 4+4 cores, 10-core GPU",
        "provenance": Provenance(
            command=None, config={}, seed=None, data=None, num_samples=None, versions={}, machine={}
        ),
        "checkpoints": (SavedCheckpoint(name="step-000000100", step=100, size_bytes=1024),),
        "incidents": (Incident(kind="oom", time=1060.0, step=7, fields={"reason": "too big", "micro_batch": 8}),),
        "phases": phases({"forward": 75.0, "data": 25.0}),
        "inexact_since": 7,
        "inexact_reason": "half the micro batch",
        "damaged_lines": 2,
        "resume": "whet train text --run /runs/text-001",
    }
    return RunReport(**{**values, **changes})


def test_the_whole_page() -> None:
    page = render_text(report(loss=None, tracks=()), width=110)
    lines = page.splitlines()
    assert lines[:8] == [
        "run       text-001: text, stopped at step 100 of 687, epoch 3, 3,200 samples",
        "machine   Apple M2, 4+4 cores, 10-core GPU",
        "time      14 min of training",
        "loss      none yet",
        "goal      accuracy: last 1, best 1 (step 100)",
        "saved     1 checkpoint, newest step-000000100 (1 kB)",
        "exact     not bit-exact since step 7: half the micro batch",
        "damage    skipped 2 unreadable lines of events.jsonl",
    ]
    assert lines[-14:] == [
        "setting      value  why                                        from",
        "device       mps    6.1x the CPU; 199 gradients agree with it  measured",
        "micro_batch  16                                                you",
        "1 setting by rules: whet plan /runs/text-001",
        "",
        "events",
        "  step 7 after 60 s: out of memory; too big; micro_batch 8",
        "",
        "time of the steps by phase",
        "   75 %        75 s  forward",
        "   25 %        25 s  data",
        "",
        "resume it with",
        "  whet train text --run /runs/text-001",
    ]


@pytest.mark.parametrize(
    ("kind", "details", "logged"),
    [
        (
            "throttle",
            {"cause": "heat", "state": "hot", "factor": 1.31, "since_step": 3, "thermal": "heavy", "reason": "slower"},
            "slower",
        ),
        ("pressure", {"level": "critical", "reason": "memory is nearly used up"}, "memory is nearly used up"),
        ("resume", {"total_steps": 9, "goal": None, "mode": "max", "rejected": []}, "resumed"),
        (
            "resume",
            {"total_steps": 9, "rejected": ["step-000000007: a file is missing"], "exact": False, "reason": "a stream"},
            "resumed; a stream; 1 checkpoint rejected: step-000000007: a file is missing",
        ),
        ("skip", {"reason": "the loss was NaN"}, "a step was skipped; the loss was NaN"),
        ("oom", {"reason": "too big", "micro_batch": 8}, "out of memory; too big; micro_batch 8"),
        ("throttle", {}, "throttle"),
        ("eclipse", {"depth": 2.5}, "eclipse; depth 2.5"),
    ],
)
def test_incidents_as_text(kind: str, details: dict[str, Any], logged: str) -> None:
    page = render_text(report(incidents=(Incident(kind=kind, time=1002.0, step=7, fields=details),)), width=140)
    assert f"  step 7 after 2.0 s: {logged}" in page.splitlines()


@given(
    width=st.integers(-3, 130),
    unicode=st.booleans(),
    word=st.text(max_size=40),
    value=st.floats() | st.integers() | st.text(max_size=30) | st.none() | st.booleans(),
)
def test_no_width_and_no_text_breaks_the_page(width: int, unicode: bool, word: str, value: Any) -> None:
    strange = report(
        recipe=word,
        machine=word,
        settings=(*SETTINGS, ReportSetting(name=word, value=value, reason=word * 3, source=word, evidence=word)),
        incidents=(Incident(kind=word, time=-1e9, step=1, fields={word: value, "reason": word}),) * 20,
        phases=phases({word: 1e300, "x": 0.0}),
    )
    page = render_text(strange, width=width, unicode=unicode)
    body, _, command = page.partition("\n\nresume it with\n")
    assert command.strip() == "whet train text --run /runs/text-001"
    assert all(len(line) <= max(width, MIN_WIDTH) for line in body.split("\n"))
    assert all(char.isprintable() or char == "\n" for char in page)
    assert unicode or page.isascii()
    assert "and 8 more" in page


def test_escape_sequences_of_a_foreign_folder_do_not_reach_the_terminal() -> None:
    page = render_text(report(machine="\x1b[31mred\x1b]0;title\x07", resume="whet \x1b[2J"))
    assert "\x1b" not in page
    assert "\x07" not in page


def test_numbers_and_texts_of_a_damaged_folder_do_not_flood_the_page() -> None:
    endless = SETTINGS[0].model_copy(update={"reason": "x" * 20_000})
    page = render_text(report(phases=phases({"forward": math.inf, "data": math.nan}), settings=(endless,)))
    assert len(page) < 10_000
    assert "20,000 characters" in page.replace("\n", " ")
    assert "unknown  forward" in page


def test_only_a_running_training_has_the_time_of_its_newest_event() -> None:
    when = time.strftime("%H:%M", time.localtime(840))
    assert f"as of {when}" in render_text(report(state="running"))
    assert "as of" not in render_text(report())
    damaged = (SessionSpan(started=0.0, ended=1e300, step=0, begins_at=0.0),)
    assert "as of" not in render_text(report(state="running", sessions=damaged))


def test_a_run_that_never_started_is_short() -> None:
    page = render_text(
        report(
            state="never started",
            loss=None,
            tracks=(),
            goal=None,
            evaluations=(),
            settings=(),
            checkpoints=(),
            incidents=(),
            phases=(),
            inexact_since=None,
            damaged_lines=0,
            resume=None,
            sessions=(),
        )
    )
    assert page.splitlines() == [
        "run       text-001: text, never started",
        "machine   Apple M2, 4+4 cores, 10-core GPU",
        "time      none yet",
        "loss      none yet",
        "saved     no checkpoint",
    ]


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_falling_line_in_stars() -> None:
    curve = curve_from_values({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0, 5: 0.0}, field="loss")
    assert draw_curve(curve, width=12, height=5, unicode=False) == (
        "4 |*",
        "  |***",
        "  |  ***",
        "  |    ***",
        "0 |      ***",
        "   1       5",
    )


def test_a_falling_line_in_braille() -> None:
    curve = curve_from_values({1: 1.0, 2: 0.0}, field="loss")
    assert draw_curve(curve, width=12, height=2) == (
        "1 \u2502\u2813\u2826\u28c4\u28c0",
        "0 \u2502   \u2808\u2819\u2812\u2826\u28c4\u28c0",
        "   1       2",
    )


def marks(row: str) -> str:
    return row.partition("|")[2]


def test_nan_leaves_a_gap() -> None:
    values = {step: 1.0 + step / 100 for step in range(1, 41)}
    whole = draw_curve(curve_from_values(values, field="x"), width=49, height=1, unicode=False)
    holed = draw_curve(
        curve_from_values({**values, **dict.fromkeys(range(15, 25), math.nan)}, field="x"),
        width=49,
        height=1,
        unicode=False,
    )
    assert " " not in marks(whole[0])
    assert 8 <= marks(holed[0]).count(" ") <= 12
    assert draw_curve(curve_from_values({1: math.nan, 2: math.inf}, field="x"), width=40, height=3) == ()


def test_a_spike_inside_a_downsampled_point_is_drawn() -> None:
    curve = curve_from_values(dict.fromkeys(range(1, 30), 0.0), field="x")
    spiked = curve.points[10]._replace(high=9.0)
    curve = curve.model_copy(update={"points": (*curve.points[:10], spiked, *curve.points[11:])})
    drawn = draw_curve(curve, width=40, height=4, unicode=False)
    assert [marks(row).count("*") for row in drawn[:3]] == [1, 1, 1]
    assert drawn[0].startswith("9 |")


@given(
    values=st.dictionaries(st.integers(0, 10**12), st.floats(), max_size=40),
    width=st.integers(-2, 90),
    height=st.integers(-1, 12),
    unicode=st.booleans(),
)
def test_any_curve_fits(values: dict[int, float], width: int, height: int, unicode: bool) -> None:
    drawn = draw_curve(curve_from_values(values, field="x"), width=width, height=height, unicode=unicode)
    finite = any(math.isfinite(value) for value in values.values())
    assert bool(drawn) == (finite and width >= 2 and height >= 1)
    assert len(drawn) in (0, height + 1)
    assert all(len(row) <= width for row in drawn)
    assert unicode or all(row.isascii() for row in drawn)
    if drawn:
        assert any(set(row) - set(" |\u25020123456789.e+-") for row in drawn[:-1])


@pytest.mark.parametrize("values", [{5: 2.0}, {1: 2.0, 9: 2.0}, {1: -1e308, 2: 1e308}, {1: 5e-324, 2: 0.0}])
def test_extreme_curves(values: dict[int, float]) -> None:
    drawn = draw_curve(curve_from_values(values, field="x"), width=40, height=5)
    assert len(drawn) == 6
