"""The page of known wrong results, from `whet.plan.hazard_table`."""

from collections.abc import Sequence

from whet.plan.hazard_table import BEFORE_2_11, HAZARDS, Hazard

_HEAD = """# Known wrong results on Apple's GPUs

PyTorch's MPS device has faults that raise nothing: numbers are wrong, and the run goes on. These are known for the
versions of torch that whet takes. They were read in PyTorch's sources and issues; none was reproduced here, since
nothing of whet has run on a Mac yet.

`whet plan` counts those that apply to a machine's torch, macOS and chip, prints the ones a workload is known to meet,
and lists all ids under `hazards` in its JSON. A model shows its layers, not the functions it calls: what is not printed
may still be met. An unknown version counts as affected.

"""


def hazards_page() -> str:
    """One row for each fault; then why older versions of torch are not taken."""
    rows = [(f"`{h.id}`", h.what, _where(h), _version(h.fixed_in), _links(h.issue), h.answer) for h in HAZARDS]
    older = [(version, what, _links(issue)) for version, issue, what in BEFORE_2_11]
    return (
        _HEAD
        + _table(("id", "what happens", "where", "fixed in torch", "pytorch", "what whet does"), rows)
        + "\nAn upgrade of macOS changes Apple's part of the arithmetic under the same torch.\n\n"
        + "## Why torch 2.11 is the least\n\nFaults that ended with it or before:\n\n"
        + _table(("fixed in", "what happened", "pytorch"), older)
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def _where(hazard: Hazard) -> str:
    chips = {"apple7": "M1", "apple8": "M2", "apple9": "M3, M4", "apple10": "M5"}
    since = f"macOS {hazard.macos_from[0]}.{hazard.macos_from[1]} and later" if hazard.macos_from else ""
    until = f"before macOS {hazard.macos_until[0]}.{hazard.macos_until[1]}" if hazard.macos_until else ""
    parts = [", ".join(chips[family] for family in hazard.families), since, until, ", ".join(sorted(hazard.needs))]
    return "; ".join(filter(None, parts)) or "everywhere"


def _version(release: tuple[int, int] | None) -> str:
    if release is None:
        return "not known"
    return "after 2.13" if release > (2, 13) else f"{release[0]}.{release[1]}"


def _links(issues: str) -> str:
    numbers = [word.strip().removeprefix("#") for word in issues.split(",")]
    return ", ".join(f"[#{number}](https://github.com/pytorch/pytorch/issues/{number})" for number in numbers)
