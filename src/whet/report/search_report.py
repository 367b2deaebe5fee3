"""Render search results as text."""

from whet.base.units import format_bytes, format_seconds
from whet.report.seeds import format_interval
from whet.report.table import align_columns
from whet.run.search_result import SearchCandidate, SearchResult, SearchTrial

_MAX_ROWS = 40


def render_search(result: SearchResult, *, max_rows: int | None = _MAX_ROWS) -> str:
    """Return the result of a search as plain text, with at most `max_rows` trials (None for all)."""
    rows = [_cells(result, trial) for trial in _ranked(result)[:max_rows]]
    lines = [
        f"search    {result.name}: {result.recipe}, {' '.join(result.space)}",
        f"trials    {_trial_counts(result)}",
        "",
    ]
    lines += align_columns([("trial", result.goal, "settings", "steps", "time", "memory", ""), *rows])
    if len(result.trials) > len(rows):
        lines += [f"and {len(result.trials) - len(rows):,} more; --markdown and --json have them all"]
    if result.importance:
        lines += ["", "important " + ", ".join(f"{key} {100 * share:.0f} %" for key, share in _shares(result))]
    if result.candidates:
        lines += [
            "",
            *(f"{'seeds' if n == 0 else '':<10}{_seed_line(result, c)}" for n, c in enumerate(result.candidates)),
        ]
    return "\n".join([*lines, "", f"winner    {winner_text(result)}"])


def winner_text(result: SearchResult) -> str:
    """Return the winner as text, with its interval and whether it is clearly ahead of the second."""
    winner = result.winner
    if winner is None:
        return "none: no trial was completed"
    named = f"trial {winner.number} ({format_settings(winner.settings)}): {result.goal} {winner.mean:.4g}"
    if not winner.values:
        return f"{named}, from one run; " + (_lost_seeds(winner) if winner.lost else "no other seeds were trained")
    if not result.is_confirmed:
        return f"{named} from {len(winner.values)} of {result.seeds} seeds; run the same search again to continue"
    if winner.low is None:
        return f"{named} with one other seed; an interval needs two or more"
    text = f"{named}, {_interval(result, winner)} with {len(winner.values)} seeds"
    text += f"; {_lost_seeds(winner)}" if winner.lost else ""
    if len(result.candidates) < 2:
        return text
    second = f"trial {result.candidates[1].number}"
    return f"{text}; " + (f"clearly ahead of {second}" if result.is_clear else f"not clearly ahead of {second}")


def format_settings(settings: dict[str, object]) -> str:
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


def _trial_counts(result: SearchResult) -> str:
    states = ("complete", "pruned", "infeasible", "failed", "running", "waiting")
    counts = {state: sum(trial.state == state for trial in result.trials) for state in states}
    parts = [f"{count} {state}" for state, count in counts.items() if count]
    steps = sum(trial.steps for trial in result.trials)
    more = f"; {result.continued} resumed after a stop or a kill" if result.continued else ""
    share = f"; on {100 * result.subset:g} % of the training split" if result.subset < 1 else ""
    return f"{len(result.trials)} ({', '.join(parts)}), {steps:,} steps, {format_seconds(result.seconds)}{share}{more}"


def _ranked(result: SearchResult) -> list[SearchTrial]:
    """Return the trials to list: completed ones and then pruned ones, best first, followed by all others by number."""
    sign = -1 if result.is_higher_better else 1
    order = ("complete", "pruned")

    def key(trial: SearchTrial) -> tuple[int, float, int]:
        place = order.index(trial.state) if trial.state in order and trial.value is not None else len(order)
        return place, sign * (trial.value or 0.0) if place < len(order) else 0.0, trial.number

    return sorted(result.trials, key=key)


def _cells(result: SearchResult, trial: SearchTrial) -> tuple[str, ...]:
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    why = f"{trial.state} on {trial.machine}" if trial.state == "infeasible" and trial.machine else trial.state
    is_winner = result.winner is not None and result.winner.number == trial.number
    note = f"{why}: {trial.note}"[:120] if trial.note else ("winner" if is_winner else why)
    return (
        str(trial.number),
        value,
        format_settings(trial.settings),
        f"{trial.steps:,}",
        format_seconds(trial.seconds),
        format_bytes(trial.peak_bytes) if trial.peak_bytes else "-",
        "" if note == "complete" else note,
    )


def _shares(result: SearchResult) -> list[tuple[str, float]]:
    return sorted(result.importance.items(), key=lambda item: -item[1])


def _seed_line(result: SearchResult, candidate: SearchCandidate) -> str:
    around = _interval(result, candidate)
    values = ", ".join(f"{value:.4g}" for value in candidate.values.values())
    text = f"{candidate.mean:.4g} ({around}; {values})" if values else f"{candidate.mean:.4g} (one run)"
    text += f", {_lost_seeds(candidate)}" if candidate.lost else ""
    return f"trial {candidate.number}  {text}  {format_settings(candidate.settings)}"


def _lost_seeds(candidate: SearchCandidate) -> str:
    return f"no value with {candidate.lost} other seed{'s' if candidate.lost > 1 else ''}"


def _interval(result: SearchResult, candidate: SearchCandidate) -> str:
    if candidate.low is None or candidate.high is None:
        return "no interval"
    return format_interval(result.goal, mean=candidate.mean, low=candidate.low, high=candidate.high, form=".4g")
