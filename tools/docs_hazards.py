"""Generate the page of known wrong results from `whet.plan.hazard_table`."""

from collections.abc import Sequence

from whet.plan.hazard_table import BEFORE_2_11, HAZARDS, Hazard

_HEAD = """# Known wrong results on Apple's GPUs

Some faults of PyTorch's MPS device raise no error: the results are wrong, and the training continues. These are known
for the versions of torch that whet supports. They come from PyTorch's sources and issues; none was reproduced, because
whet has not run on a Mac yet.

`whet plan` counts those that apply to a machine's torch, macOS and chip, prints the ones that the workload is known to
meet, and lists all ids under `hazards` in its JSON. It sees the layers of a model, not the functions that the model
calls, so the model may meet others; `whet check` finds them. An unknown version counts as affected.

"""


def hazards_page() -> str:
    """Return the page: one row per fault, then the reasons for the minimum version of torch."""
    rows = [(f"`{h.id}`", h.what, _where(h), _versions(h), _links(h.issue), h.answer) for h in HAZARDS]
    older = [(version, what, _links(issue)) for version, issue, what in BEFORE_2_11]
    return (
        _HEAD
        + table(("id", "what happens", "where", "torch", "pytorch", "what whet does"), rows)
        + "\nAn upgrade of macOS may change results with the same torch, because part of the arithmetic is Apple's.\n\n"
        + "## Why torch 2.11 is the minimum\n\nFaults fixed in it or earlier:\n\n"
        + table(("fixed in", "what happened", "pytorch"), older)
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def _where(hazard: Hazard) -> str:
    chips = {"apple7": "M1", "apple8": "M2", "apple9": "M3, M4", "apple10": "M5"}
    since = f"macOS {hazard.macos_from[0]}.{hazard.macos_from[1]} and later" if hazard.macos_from else ""
    until = f"before macOS {hazard.macos_until[0]}.{hazard.macos_until[1]}" if hazard.macos_until else ""
    parts = [", ".join(chips[family] for family in hazard.families), since, until, ", ".join(sorted(hazard.needs))]
    return "; ".join(filter(None, parts)) or "everywhere"


def _versions(hazard: Hazard) -> str:
    since = "from {}.{}".format(*hazard.since) if hazard.since else ""
    until = "before {}.{}".format(*hazard.fixed_in) if hazard.fixed_in else ""
    return " and ".join(filter(None, (since, until))) or "all"


def _links(issues: str) -> str:
    numbers = [word.strip().removeprefix("#") for word in issues.split(",")]
    return ", ".join(f"[#{number}](https://github.com/pytorch/pytorch/issues/{number})" for number in numbers)
