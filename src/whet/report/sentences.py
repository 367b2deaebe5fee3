"""How is a happening of a run told in a sentence?"""

from whet.plan.words import show_value
from whet.report.summary import Happening

_OPENINGS = {
    "oom": "out of memory",
    "resume": "went on",
    "throttle": "",
    "pressure": "",
    "restart": "started again",
    "skip": "a step was left out",
    "spike": "a loss far above the usual",
    "fallback": "",
    "warning": "",
}
_OWN_PLACE = {
    "resume": ("total_steps", "goal", "goal_is", "refused", "exactness", "went_back", "moved_from"),
    "oom": ("cure",),
    "restart": ("cure",),
    "throttle": ("about", "state", "factor", "since_step", "thermal", "rested_seconds"),
    "pressure": ("level",),
    "fallback": ("operators",),
    "skip": ("verdict", "samples"),
    "spike": ("samples",),
    "warning": ("path", "errno", "free_bytes", "again"),
}
"""Details that are said by the sentence, or belong elsewhere."""


def sentence(happening: Happening) -> str:
    """What happened, why, and what else was written down; of a kind that is not known here, everything."""
    kind, details = happening.kind, happening.details
    told = ("reason", "exact", *_OWN_PLACE.get(kind, ()))
    rest = ", ".join(f"{name} {show_value(value)}" for name, value in details.items() if name not in told)
    parts = [
        "a fault of the moment" if details.get("verdict") == "transient" else _OPENINGS.get(kind, kind),
        details.get("reason"),
        details.get("cure"),
        details.get("exactness"),
        details.get("went_back"),
        _refused(details.get("refused")),
        rest,
    ]
    return "; ".join(str(part) for part in parts if part) or kind


def _refused(problems: object) -> str:
    """Checkpoints that could not be trusted when the run went on."""
    if not isinstance(problems, list | tuple) or not problems:
        return ""
    return f"{len(problems)} checkpoint{'s' if len(problems) > 1 else ''} refused: {'; '.join(map(str, problems))}"
