"""How does a search read? Its trials, what mattered, the best over seeds, and whether the winner is a clear one."""

from collections.abc import Iterator, Sequence

from whet.base.units import show_seconds
from whet.report.interval import interval_words
from whet.report.markdown import code, escaped, table
from whet.run.search_result import Candidate, SearchResult, SearchTrial

_MOST_ROWS = 40


def render_search(result: SearchResult) -> str:
    """Plain lines for a terminal."""
    rows = [_cells(result, trial) for trial in _ranked(result)[:_MOST_ROWS]]
    lines = [f"search    {result.name}: {result.recipe}, {' '.join(result.space)}", f"trials    {_counted(result)}", ""]
    lines += _columns(("trial", result.goal, "settings", "steps", "time", ""), rows)
    if len(result.trials) > len(rows):
        lines += [f"and {len(result.trials) - len(rows):,} more; --markdown and --json have them all"]
    if result.importance:
        lines += ["", "mattered  " + ", ".join(f"{key} {100 * share:.0f} %" for key, share in _shares(result))]
    if result.candidates:
        lines += [
            "",
            *(f"{'seeds' if n == 0 else '':<10}{_over_seeds(result, c)}" for n, c in enumerate(result.candidates)),
        ]
    return "\n".join([*lines, "", f"winner    {verdict(result)}"])


def search_markdown(result: SearchResult) -> str:
    """The same as a page of Markdown."""
    rows = [tuple(escaped(cell) for cell in _cells(result, trial)) for trial in _ranked(result)]
    sections = [
        f"# {escaped(result.name)}",
        f"{escaped(result.recipe)}: {' '.join(code(word) for word in result.space)}. {escaped(_counted(result))}.",
        f"**Winner:** {escaped(verdict(result))}",
        table(
            ("candidate", "settings", result.goal, "95 %"),
            [
                (
                    f"trial {c.number}",
                    escaped(settings_words(c.settings)),
                    f"{c.mean:.4g}",
                    escaped(_interval(result, c)),
                )
                for c in result.candidates
            ],
        ),
        table(("setting", "mattered"), [(code(key), f"{100 * share:.0f} %") for key, share in _shares(result)]),
        "## Trials\n\n" + table(("trial", escaped(result.goal), "settings", "steps", "time", ""), rows),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def verdict(result: SearchResult) -> str:
    """Who won, with its interval, and how sure that is."""
    winner = result.winner
    if winner is None:
        return "none: no trial came to its end"
    named = f"trial {winner.number} ({settings_words(winner.settings)}): {result.goal} {winner.mean:.4g}"
    if not winner.values:
        return f"{named}, by one run; " + (_lost(winner) if winner.lost else "other seeds were not tried")
    if not result.is_confirmed:
        return f"{named} by {len(winner.values)} of {result.seeds} seeds; the same search goes on"
    if winner.low is None:
        return f"{named} with one other seed; two or more give an interval"
    said = f"{named}, {_interval(result, winner)} with {len(winner.values)} seeds"
    said += f"; {_lost(winner)}" if winner.lost else ""
    if len(result.candidates) < 2:
        return said
    second = f"trial {result.candidates[1].number}"
    return f"{said}; " + (f"clearly ahead of {second}" if result.is_clear else f"not clearly ahead of {second}")


def settings_words(settings: dict[str, object]) -> str:
    """Settings in a few signs each."""
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


def _counted(result: SearchResult) -> str:
    states = ("complete", "pruned", "infeasible", "failed", "running", "waiting")
    counts = {state: sum(trial.state == state for trial in result.trials) for state in states}
    parts = [f"{count} {state}" for state, count in counts.items() if count]
    steps = sum(trial.steps for trial in result.trials)
    more = f"; {result.continued} went on after a stop or a kill" if result.continued else ""
    share = f"; on {100 * result.subset:g} % of the training part" if result.subset < 1 else ""
    return f"{len(result.trials)} ({', '.join(parts)}), {steps:,} steps, {show_seconds(result.seconds)}{share}{more}"


def _ranked(result: SearchResult) -> list[SearchTrial]:
    """Those with a value first, the best on top; then the others by number."""
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
    words = f"{why}: {trial.words}"[:120] if trial.words else ("winner" if is_winner else why)
    return (
        str(trial.number),
        value,
        settings_words(trial.settings),
        f"{trial.steps:,}",
        show_seconds(trial.seconds),
        "" if words == "complete" else words,
    )


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _shares(result: SearchResult) -> list[tuple[str, float]]:
    return sorted(result.importance.items(), key=lambda item: -item[1])


def _over_seeds(result: SearchResult, candidate: Candidate) -> str:
    around = _interval(result, candidate)
    values = ", ".join(f"{value:.4g}" for value in candidate.values.values())
    told = f"{candidate.mean:.4g} ({around}; {values})" if values else f"{candidate.mean:.4g} (one run)"
    told += f", {_lost(candidate)}" if candidate.lost else ""
    return f"trial {candidate.number}  {told}  {settings_words(candidate.settings)}"


def _lost(candidate: Candidate) -> str:
    return f"no value with {candidate.lost} other seed{'s' if candidate.lost > 1 else ''}"


def _interval(result: SearchResult, candidate: Candidate) -> str:
    if candidate.low is None or candidate.high is None:
        return "no interval"
    return interval_words(result.goal, mean=candidate.mean, low=candidate.low, high=candidate.high, form=".4g")
