"""How does a board of runs look in a terminal of any size? Lines with colours, none longer or more than there is room.

Every text of a run passes `clean`: a run folder may come from anywhere, and its names and logs must not steer the
terminal.
"""

import shlex
import time
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from whet.base.units import printable, show_bytes, show_seconds
from whet.report.board import Board
from whet.report.curve import draw, spark
from whet.report.glance import Glance, Vitals

LEAST_WIDTH, LEAST_HEIGHT = 24, 4
_STATES = {"running": "bold green", "done": "cyan", "stopped": "yellow", "failed": "bold red", "unreadable": "red"}
_SILENT_SECONDS = 60.0
_LABEL = 9
_BAR = 24
_MOST_GROUPS, _LEAST_WITH_GROUPS = 3, 16
_SPARK = 16
_CURVE_WIDTH, _CURVE_HEIGHT, _LEAST_CURVE = 120, 14, 3
_KEYS = "q leaves   up and down choose a run"


@dataclass(frozen=True, slots=True)
class Paper:
    """What can be drawn on."""

    width: int
    height: int | None
    """None where lines may go on for ever."""
    unicode: bool = True

    def clean(self, text: str) -> str:
        """The text without line ends or anything else that steers a terminal, in characters that it has."""
        text = printable(text).replace("\n", " ")
        return text if self.unicode else text.encode("ascii", "replace").decode()

    def fit(self, text: str, cells: int) -> str:
        """The text in exactly so many columns; wide characters count as two."""
        return set_cell_size(self.clean(text), max(0, cells))


def num_rows(height: int) -> int:
    """How many runs are listed on so many lines."""
    return max(1, (height - 4) // 3)


def lines(board: Board, paper: Paper, *, has_keys: bool = False) -> list[Text]:
    """The board: a heading, the runs, the chosen one in full."""
    drawn = [_heading(board, paper), *_table(board, paper), *_groups(board, paper)]
    foot = [Text(_KEYS, style="dim")] if has_keys else []
    room = None if paper.height is None else paper.height - len(drawn) - len(foot)
    chosen = board.rows[board.chosen] if board.chosen is not None else None
    if chosen is not None:
        drawn += _details(chosen, paper, now=board.now, room=room)
    if paper.height is not None:
        drawn = drawn[: max(1, paper.height - len(foot))]
        drawn += [Text()] * (paper.height - len(foot) - len(drawn))
    drawn += foot
    for line in drawn:
        line.truncate(paper.width)
        line.no_wrap = True
    return drawn


def _heading(board: Board, paper: Paper) -> Text:
    if board.num_runs == 0:
        words = "itself" if board.groups else "yet; `whet train text` makes one"
        return Text(paper.clean(f"no runs in {board.folder} {words}"))
    shown = f", {board.first + 1:,} to {board.first + len(board.rows):,}" if len(board.rows) < board.num_runs else ""
    count = f"{board.num_runs:,} run{'s' if board.num_runs != 1 else ''}{shown}"
    clock = time.strftime("%H:%M:%S", time.localtime(board.now))
    left = f"whet watch  {board.folder}"
    right = f"{count}  {clock}"
    gap = max(2, paper.width - len(right))
    return Text.assemble((paper.fit(left, gap - 2) + "  ", "bold"), (right, "dim"))


_COLUMNS = ("state", "step", "loss", "curve", "left", "goal", "changed")
"""From what is dropped last to what is dropped first where there is no room."""


def _table(board: Board, paper: Paper) -> list[Text]:
    if not board.rows:
        return []
    name_cells = max(8, min(max(cell_len(row.path.name) for row in board.rows), paper.width // 3))
    used, columns = 2 + name_cells, []
    for heading in _COLUMNS:
        cells = [_cell(row, heading, now=board.now, paper=paper) for row in board.rows]
        width = max(len(heading), *(cell_len(text) for text, _ in cells))
        if not any(text for text, _ in cells):
            continue
        if used + 2 + width > paper.width:
            break
        used += 2 + width
        columns.append((heading, cells, width))
    header = "  " + paper.fit("run", name_cells) + "".join("  " + paper.fit(head, width) for head, _, width in columns)
    table = [Text(header.rstrip(), style="dim")]
    for place, row in enumerate(board.rows):
        is_chosen = place == board.chosen and board.num_runs > 1
        line = Text("> " if is_chosen else "  ")
        line.append(paper.fit(row.path.name, name_cells), style="bold" if is_chosen else "")
        for _, cells, width in columns:
            text, style = cells[place]
            line.append("  ")
            line.append(paper.fit(text, width), style=style)
        table.append(line)
    return table


def _groups(board: Board, paper: Paper) -> list[Text]:
    """Where more runs lie; a small screen has no room for it."""
    if paper.height is not None and paper.height < _LEAST_WITH_GROUPS:
        return []
    told = []
    for path, number in list(board.groups.items())[:_MOST_GROUPS]:
        command = f"whet watch {shlex.quote(str(path))} --terminal"
        told.append(Text(paper.clean(f"  {path} holds {number:,} more: {command}"), style="dim"))
    left = len(board.groups) - len(told)
    return [*told, Text(f"  and {left:,} more such folders", style="dim")] if left else told


def _cell(row: Glance, heading: str, *, now: float, paper: Paper) -> tuple[str, str]:
    """The words and their style."""
    if heading == "state":
        return row.state, _STATES.get(row.state, "")
    if heading == "step":
        return _progress(row), ""
    if heading == "loss":
        return _number(row.loss), ""
    if heading == "curve":
        return (spark(row.curve, width=_SPARK, unicode=paper.unicode) if row.curve else ""), "cyan"
    if heading == "left":
        return (show_seconds(row.seconds_left) if row.seconds_left is not None else ""), ""
    if heading == "goal":
        return _goal(row), ""
    return _ago(now - row.changed), "dim"


def _goal(row: Glance) -> str:
    return f"{row.goal} {row.goal_value:.4g}" if row.goal and row.goal_value is not None else ""


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{show_seconds(seconds)} ago"


def _progress(row: Glance) -> str:
    if not row.total_steps:
        return f"{row.step:,}"
    return f"{row.step:,}/{row.total_steps:,} {100 * row.step / row.total_steps:3.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _details(row: Glance, paper: Paper, *, now: float, room: int | None) -> list[Text]:
    """The chosen run; the curve takes what figures and events leave."""
    figures = [_line("problem", row.problem, paper, style="red")] if row.problem else _figures(row, paper, now=now)
    told = [_told(row, place, paper, now=now) for place in range(len(row.told))]
    if room is None:
        told, curve_room = told[:6], 8
    else:
        left = room - 1 - len(figures)
        few = told[: max(0, min(6, left // 3))]
        curve_room = min(_CURVE_HEIGHT, left - len(few) - 3)
        told = few if curve_room >= _LEAST_CURVE else told[: max(0, left - 1)]
    drawn = [Text(), *figures]
    if row.curve is not None and curve_room >= _LEAST_CURVE:
        width = min(paper.width, _CURVE_WIDTH)
        curve = draw(row.curve, width=width, height=curve_room, unicode=paper.unicode)
        drawn += [Text(), *(Text(line, style="cyan") for line in curve)] if curve else []
    return [*drawn, Text(), *told] if told else drawn


def _figures(row: Glance, paper: Paper, *, now: float) -> list[Text]:
    what = row.recipe + (f" on {row.device}" if row.device else "") + (f", epoch {row.epoch}" if row.epoch else "")
    figures = [Text.assemble((paper.clean(row.path.name), "bold"), (paper.clean(f"  {what}"), ""))]
    if row.total_steps:
        left = f", {show_seconds(row.seconds_left)} left" if row.seconds_left is not None else ""
        words = f"{row.step:,} of {row.total_steps:,}{left}"
        figures.append(_gauge("step", row.step / row.total_steps, words, paper, style="green"))
    speed = f"{row.samples_per_second:,.0f} samples/s" if row.samples_per_second else ""
    facts = [_number(row.loss) or "none yet", _goal(row), speed]
    figures.append(_line("loss", "   ".join(fact for fact in facts if fact), paper))
    figures += _vitals(row.vitals, paper)
    silent = now - row.changed
    if row.state == "running" and silent > _SILENT_SECONDS:
        figures.append(_line("silent", f"no word for {show_seconds(silent)}", paper, style="yellow"))
    if row.resume:
        figures.append(_line("go on", row.resume, paper, style="yellow"))
    return figures


def _vitals(vitals: Vitals, paper: Paper) -> list[Text]:
    figures: list[Text] = []
    if vitals.used_bytes is not None:
        limit, system, whole = vitals.limit_bytes, vitals.system_bytes, vitals.system_limit_bytes
        words = show_bytes(vitals.used_bytes) + (f" of {show_bytes(limit)}" if limit else "")
        words += f", machine {show_bytes(system)} of {show_bytes(whole)}" if system is not None and whole else ""
        words += f", swap {show_bytes(vitals.swap_bytes)}" if vitals.swap_bytes else ""
        words += f", pressure {vitals.pressure}" if vitals.pressure else ""
        share = vitals.used_bytes / limit if limit else None
        figures.append(_gauge("memory", share, words, paper, style="red" if vitals.pressure else None))
    for name, share in (("gpu", vitals.gpu), ("cpu", vitals.cpu)):
        if share is not None:
            figures.append(_gauge(name, share, f"{100 * share:.0f} % in use", paper, style="green"))
    if vitals.heat:
        figures.append(_line("heat", vitals.heat, paper, style="" if vitals.heat.startswith("cool") else "yellow"))
    return figures


def _line(label: str, text: str, paper: Paper, *, style: str = "") -> Text:
    return Text.assemble((paper.fit(label, _LABEL), "dim"), (paper.clean(text), style))


def _gauge(label: str, share: float | None, words: str, paper: Paper, *, style: str | None = None) -> Text:
    """A bar and what it says; one that nears its end turns yellow, then red, unless its end is the aim."""
    line = Text(paper.fit(label, _LABEL), style="dim")
    cells = min(_BAR, paper.width - _LABEL - len(words) - 2)
    if share is not None and cells >= 4:
        filled = round(max(0.0, min(1.0, share)) * cells)
        full, empty = ("\u2501", "\u2500") if paper.unicode else ("#", "-")
        colour = style or ("red" if share > 0.95 else "yellow" if share > 0.85 else "green")
        line.append(full * filled, style=colour)
        line.append(empty * (cells - filled) + "  ", style="dim")
    line.append(paper.clean(words), style="default not dim")
    return line


def _told(row: Glance, place: int, paper: Paper, *, now: float) -> Text:
    told = row.told[place]
    head = f"{_ago(now - told.time):>13}  step {told.step:<9,} "
    return Text.assemble((head, "dim"), (paper.clean(told.text), "yellow" if told.is_bad else ""))
