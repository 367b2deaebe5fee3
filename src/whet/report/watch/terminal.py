"""The live view of runs in a terminal of any size."""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_seconds, printable
from whet.report.run_status import LiveStatus, MachineLoad, live_status, unreadable_status
from whet.report.text_chart import draw_curve, sparkline
from whet.run.folder import EVENTS_FILE, RUN_FILE, open_run, run_folders, run_groups
from whet.run.follow import LiveHistory
from whet.run.lock import is_locked

ACTIVE_SECONDS = 120.0
"""Runs that changed since stand first, by name, so that their rows keep their place."""
_CURVE_POINTS = 200
_GROUPS_SECONDS = 5.0

EventsStamp = tuple[int, int, int]


class RunBoard(FrozenModel):
    """What a live view shows at one moment."""

    folder: Path
    now: float
    num_runs: int
    rows: tuple[LiveStatus, ...]
    """As many as there is room for."""
    first: int = 0
    """Which of all runs the first row is."""
    chosen: int | None = None
    """Which of the rows is shown in full."""
    groups: dict[Path, int] = Field(default_factory=dict)
    """Folders beside the runs that hold some, as those of a search do, and how many each."""


@dataclass(slots=True)
class _CachedStatus:
    stamp: EventsStamp
    glance: LiveStatus
    history: LiveHistory | None
    """Kept, so that only new bytes are read; None for what cannot be read."""


class BoardReader:
    """Looks at the runs in a folder, or at the one run that it is."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._seen: dict[Path, _CachedStatus] = {}
        self._chosen: Path | None = None
        self._num_lively = 0
        self._groups: dict[Path, int] = {}
        self._grouped_at = -_GROUPS_SECONDS

    def look(self, *, rows: int, move: int = 0) -> RunBoard:
        """The runs as they are now, `rows` of them; `move` chooses the one that many places further down."""
        now = self._clock()
        paths = self._paths(now)
        position = self._choose(paths, move)
        first = max(0, min(position - rows // 2, len(paths) - rows))
        shown = paths[first : first + rows]
        seen = {path: self._glance(path) for path in shown}
        self._seen = seen
        return RunBoard(
            folder=self._folder,
            now=now,
            num_runs=len(paths),
            rows=tuple(seen[path].glance for path in shown),
            first=first,
            chosen=position - first if shown else None,
            groups=self._groups_of(now),
        )

    def _groups_of(self, now: float) -> dict[Path, int]:
        """Looked for now and then: it is a look into every folder that is no run."""
        if (self._folder / RUN_FILE).is_file():
            return {}
        if not 0 <= now - self._grouped_at < _GROUPS_SECONDS:
            self._groups, self._grouped_at = run_groups(self._folder), now
        return self._groups

    def _choose(self, paths: list[Path], move: int) -> int:
        """Until somebody chooses, it is the run that was made last of those at work."""
        if self._chosen in paths:
            position = paths.index(self._chosen)
        else:
            lively = range(self._num_lively)
            position = max(lively, key=lambda place: _made(paths[place]), default=0)
        if move and paths:
            position = max(0, min(position + move, len(paths) - 1))
            self._chosen = paths[position]
        return position

    def _paths(self, now: float) -> list[Path]:
        """The liveliest first."""
        if (self._folder / RUN_FILE).is_file():
            return [self._folder.absolute()]
        changes = {path: events_stamp(path)[2] / 1e9 for path in run_folders(self._folder.absolute())}
        lively = [path for path in changes if now - changes[path] < ACTIVE_SECONDS]
        self._num_lively = len(lively)
        quiet = sorted(changes.keys() - set(lively), key=lambda path: (-changes[path], path))
        return lively + quiet

    def _glance(self, path: Path) -> _CachedStatus:
        stamp, before = events_stamp(path), self._seen.get(path)
        history = before.history if before else None
        # What could not be read is looked at each time: it may be on its way here, file by file.
        if before and history is not None and before.stamp == stamp and not _state_changed(before.glance):
            return before
        try:
            run = open_run(path)
            if history is None:
                history = LiveHistory(run)
            else:
                history.refresh()
            return _CachedStatus(stamp, live_status(run, history, points=_CURVE_POINTS), history)
        except (WhetError, OSError) as error:
            return _CachedStatus(stamp, unreadable_status(path, error, changed=stamp[2] / 1e9), None)


def events_stamp(path: Path) -> EventsStamp:
    """Changes whenever the events of a run do; all zero where there are none."""
    try:
        stat = (path / EVENTS_FILE).stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _made(path: Path) -> float:
    try:
        return (path / RUN_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _state_changed(seen: LiveStatus) -> bool:
    """Whether a process has come or gone without a word in the log."""
    try:
        return is_locked(seen.path) != (seen.state == "running")
    except (WhetError, OSError):
        return False


MIN_WIDTH, MIN_HEIGHT = 24, 4
_STATES = {"running": "bold green", "done": "cyan", "stopped": "yellow", "failed": "bold red", "unreadable": "red"}
_STALE_SECONDS = 60.0
_LABEL_WIDTH = 9
_BAR_WIDTH = 24
_MAX_GROUPS, _MIN_HEIGHT_FOR_GROUPS = 3, 16
_SPARK_WIDTH = 16
_CURVE_WIDTH, _CURVE_HEIGHT, _MIN_CURVE_HEIGHT = 120, 14, 3
_KEYS = "q leaves   up and down choose a run"


@dataclass(frozen=True, slots=True)
class TerminalArea:
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


def board_rows(height: int) -> int:
    """How many runs are listed on so many lines."""
    return max(1, (height - 4) // 3)


def render_board(board: RunBoard, paper: TerminalArea, *, has_keys: bool = False) -> list[Text]:
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


def _heading(board: RunBoard, paper: TerminalArea) -> Text:
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


def _table(board: RunBoard, paper: TerminalArea) -> list[Text]:
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


def _groups(board: RunBoard, paper: TerminalArea) -> list[Text]:
    """Where more runs lie; a small screen has no room for it."""
    if paper.height is not None and paper.height < _MIN_HEIGHT_FOR_GROUPS:
        return []
    told = []
    for path, number in list(board.groups.items())[:_MAX_GROUPS]:
        command = f"whet watch {shlex.quote(str(path))} --terminal"
        told.append(Text(paper.clean(f"  {path} holds {number:,} more: {command}"), style="dim"))
    left = len(board.groups) - len(told)
    return [*told, Text(f"  and {left:,} more such folders", style="dim")] if left else told


def _cell(row: LiveStatus, heading: str, *, now: float, paper: TerminalArea) -> tuple[str, str]:
    """The words and their style."""
    if heading == "state":
        return row.state, _STATES.get(row.state, "")
    if heading == "step":
        return _progress_text(row), ""
    if heading == "loss":
        return _format_number(row.loss), ""
    if heading == "curve":
        return (sparkline(row.curve, width=_SPARK_WIDTH, unicode=paper.unicode) if row.curve else ""), "cyan"
    if heading == "left":
        return (format_seconds(row.seconds_left) if row.seconds_left is not None else ""), ""
    if heading == "goal":
        return _goal_text(row), ""
    return _ago(now - row.changed), "dim"


def _goal_text(row: LiveStatus) -> str:
    return f"{row.goal} {row.goal_value:.4g}" if row.goal and row.goal_value is not None else ""


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{format_seconds(seconds)} ago"


def _progress_text(row: LiveStatus) -> str:
    if not row.total_steps:
        return f"{row.step:,}"
    return f"{row.step:,}/{row.total_steps:,} {100 * row.step / row.total_steps:3.0f} %"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _details(row: LiveStatus, paper: TerminalArea, *, now: float, room: int | None) -> list[Text]:
    """The chosen run; the curve takes what figures and events leave."""
    figures = [_line("problem", row.problem, paper, style="red")] if row.problem else _figures(row, paper, now=now)
    told = [_recent_event(row, place, paper, now=now) for place in range(len(row.told))]
    if room is None:
        told, curve_room = told[:6], 8
    else:
        left = room - 1 - len(figures)
        few = told[: max(0, min(6, left // 3))]
        curve_room = min(_CURVE_HEIGHT, left - len(few) - 3)
        told = few if curve_room >= _MIN_CURVE_HEIGHT else told[: max(0, left - 1)]
    drawn = [Text(), *figures]
    if row.curve is not None and curve_room >= _MIN_CURVE_HEIGHT:
        width = min(paper.width, _CURVE_WIDTH)
        curve = draw_curve(row.curve, width=width, height=curve_room, unicode=paper.unicode)
        drawn += [Text(), *(Text(line, style="cyan") for line in curve)] if curve else []
    return [*drawn, Text(), *told] if told else drawn


def _figures(row: LiveStatus, paper: TerminalArea, *, now: float) -> list[Text]:
    what = row.recipe + (f" on {row.device}" if row.device else "") + (f", epoch {row.epoch}" if row.epoch else "")
    figures = [Text.assemble((paper.clean(row.path.name), "bold"), (paper.clean(f"  {what}"), ""))]
    if row.total_steps:
        left = f", {format_seconds(row.seconds_left)} left" if row.seconds_left is not None else ""
        words = f"{row.step:,} of {row.total_steps:,}{left}"
        figures.append(_gauge("step", row.step / row.total_steps, words, paper, style="green"))
    speed = f"{row.samples_per_second:,.0f} samples/s" if row.samples_per_second else ""
    facts = [_format_number(row.loss) or "none yet", _goal_text(row), speed]
    figures.append(_line("loss", "   ".join(fact for fact in facts if fact), paper))
    figures += _load_gauges(row.vitals, paper)
    silent = now - row.changed
    if row.state == "running" and silent > _STALE_SECONDS:
        figures.append(_line("silent", f"no word for {format_seconds(silent)}", paper, style="yellow"))
    if row.resume:
        figures.append(_line("go on", row.resume, paper, style="yellow"))
    return figures


def _load_gauges(vitals: MachineLoad, paper: TerminalArea) -> list[Text]:
    figures: list[Text] = []
    if vitals.used_bytes is not None:
        limit, system, whole = vitals.limit_bytes, vitals.system_bytes, vitals.system_limit_bytes
        words = format_bytes(vitals.used_bytes) + (f" of {format_bytes(limit)}" if limit else "")
        words += f", machine {format_bytes(system)} of {format_bytes(whole)}" if system is not None and whole else ""
        words += f", swap {format_bytes(vitals.swap_bytes)}" if vitals.swap_bytes else ""
        words += f", pressure {vitals.pressure}" if vitals.pressure else ""
        share = vitals.used_bytes / limit if limit else None
        figures.append(_gauge("memory", share, words, paper, style="red" if vitals.pressure else None))
    for name, share in (("gpu", vitals.gpu), ("cpu", vitals.cpu)):
        if share is not None:
            figures.append(_gauge(name, share, f"{100 * share:.0f} % in use", paper, style="green"))
    if vitals.heat:
        figures.append(_line("heat", vitals.heat, paper, style="" if vitals.heat.startswith("cool") else "yellow"))
    return figures


def _line(label: str, text: str, paper: TerminalArea, *, style: str = "") -> Text:
    return Text.assemble((paper.fit(label, _LABEL_WIDTH), "dim"), (paper.clean(text), style))


def _gauge(label: str, share: float | None, words: str, paper: TerminalArea, *, style: str | None = None) -> Text:
    """A bar and what it says; one that nears its end turns yellow, then red, unless its end is the aim."""
    line = Text(paper.fit(label, _LABEL_WIDTH), style="dim")
    cells = min(_BAR_WIDTH, paper.width - _LABEL_WIDTH - len(words) - 2)
    if share is not None and cells >= 4:
        filled = round(max(0.0, min(1.0, share)) * cells)
        full, empty = ("\u2501", "\u2500") if paper.unicode else ("#", "-")
        colour = style or ("red" if share > 0.95 else "yellow" if share > 0.85 else "green")
        line.append(full * filled, style=colour)
        line.append(empty * (cells - filled) + "  ", style="dim")
    line.append(paper.clean(words), style="default not dim")
    return line


def _recent_event(row: LiveStatus, place: int, paper: TerminalArea, *, now: float) -> Text:
    told = row.told[place]
    head = f"{_ago(now - told.time):>13}  step {told.step:<9,} "
    return Text.assemble((head, "dim"), (paper.clean(told.text), "yellow" if told.is_bad else ""))
