"""The texts that the progress line and the printer of a session show for the events of a run."""

from typing import Any

_NO_METRICS = ("step", "time")
"""Numbers in the event of an evaluation that are no metrics."""
_MAX_QUESTION, _MAX_ANSWER = 70, 100
"""Maximum number of characters of a sample's input and output to show."""


def event_message(kind: str, fields: dict[str, Any]) -> str | None:
    """Return the message for an event; None if the event needs no message."""
    if kind == "warning":
        retry = "" if fields["retry"] == "never" else f"; tried again {fields['retry']}"
        return f"{fields['reason']}{retry}; training continues"
    if kind == "oom":
        return f"out of memory at step {fields['step']:,}; {fields['action']}"
    if kind in ("skip", "spike"):
        skipped = " is skipped" if fields.get("verdict") == "reproducible" else ""
        samples = f" (samples {', '.join(map(str, fields['samples'][:8]))} ...)" if fields.get("samples") else ""
        return f"step {fields['step']:,}{skipped}: {fields['reason']}{samples}"
    if kind == "stopping":
        return str(fields["message"])
    if kind == "plan" and fields.get("is_in_plan"):
        return None
    if kind in ("plan", "fallback"):
        return str(fields.get("message") or fields["reason"])
    return str(fields["reason"]) if kind == "pressure" else None


def heat_text(fields: dict[str, Any]) -> str:
    """Return a text such as "cool" or "hot 1.3x slower". Without a sensor, return "1.3x slower" or an empty text."""
    state = fields["state"]
    words = [state] if state != "slow" and "thermal" in fields else []
    if state != "cool" and "factor" in fields:
        words.append(f"{fields['factor']:.1f}x slower")
    return " ".join(words)


def sample_answer(fields: dict[str, Any]) -> str:
    """Return the first sample of an evaluation with text outputs as one line; empty for classification."""
    samples = fields.get("samples")
    if not samples or "classes" in fields or "confusion" in fields or not isinstance(samples[0].get("predicted"), str):
        return ""
    question, answer = (" ".join(str(samples[0].get(name, "")).split()) for name in ("input", "predicted"))
    question = question if len(question) <= _MAX_QUESTION else f"... {question[-_MAX_QUESTION:]}"
    return f"{question}  ->  {answer[:_MAX_ANSWER]}{' ...' if len(answer) > _MAX_ANSWER else ''}"


def resume_message(fields: dict[str, Any], *, total: int | None) -> str:
    """Return the message for the "resume" event of a run with `total` steps."""
    step = f"step {fields['step']:,}"
    if fields.get("rollback_reason"):
        return f"rolled back to {step}: {fields['rollback_reason']}"
    if total is not None and fields["step"] >= total:
        return f"all {total:,} steps are done"
    if fields["step"] == 0:
        why = "no later checkpoint can be read" if fields.get("rejected") else "it ended before its first checkpoint"
        return f"starts again from step 0: {why}"
    return f"resumes from {step}" + (f", {fields['exactness']}" if fields.get("exactness") else "")


def no_goal_message(fields: dict[str, Any]) -> str | None:
    """Return the message for the first evaluation of a run without a goal; None if it has no metric to choose."""
    names = [name for name, value in fields.items() if name not in _NO_METRICS and isinstance(value, int | float)]
    if not names:
        return None
    return f'no goal, so the best weights are not kept; goal="{names[0]}" keeps them'
