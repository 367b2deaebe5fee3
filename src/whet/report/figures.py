"""Which few figures tell most about a run? For a table; the page has the same ones as tiles."""

from whet.base.units import show_bytes, show_count, show_seconds
from whet.report.view import RunView


def figures(view: RunView) -> dict[str, str]:
    """The figures by name, as text; what is not known is left out."""
    report = view.report
    found = {"state": report.state, "steps": _steps(view)}
    if report.loss.last is not None:
        found["training loss"] = f"{report.loss.last:.4g}"
    if report.goal is not None and report.goal.last is not None:
        found[report.goal.name] = f"{report.goal.last:.4g}"
        if report.goal.best is not None and report.goal.best != report.goal.last:
            found[f"best {report.goal.name}"] = f"{report.goal.best:.4g} (step {report.goal.best_step:,})"
        tested = report.metrics.get(f"test_{report.goal.name}")
        if tested is not None:
            found[f"test {report.goal.name}"] = f"{tested:.4g}"
    speed = next((one.happened for one in view.foretold if one.name == "speed"), None)
    if speed is not None:
        found["speed"] = f"{speed:,.4g} samples/s" if speed < 1000 else f"{speed:,.0f} samples/s"
    if report.training_seconds > 0:
        found["time at work"] = show_seconds(report.training_seconds)
    memory = most_memory(view)
    if memory is not None:
        found["most memory"] = show_bytes(memory)
    return found


def most_memory(view: RunView) -> float | None:
    """The most that tensors took, or the process where there is no such counter."""
    for source in ("health", "epoch"):
        track = view.track(source)
        for name in ("memory/peak", "memory/allocated"):
            line = track.line(name) if track is not None else None
            seen = [value for value in (line.high or line.mean) if value is not None] if line is not None else []
            if seen:
                return max(seen)
    return None


def _steps(view: RunView) -> str:
    of_all = f" of {view.report.total_steps:,}" if view.report.total_steps else ""
    samples = f", {show_count(view.report.samples)} samples" if view.report.samples is not None else ""
    return f"{view.report.step:,}{of_all}{samples}"
