"""The live view of runs in a terminal of any size: a table of runs, and details of one run.

Each refresh stats the event log of each run, and reads only the visible runs that have changed. All text of a run
passes through `TerminalArea.clean`, because a run folder may be untrusted, and its names and logs must not control the
terminal.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_seconds, printable_line
from whet.report.run_status import LiveStatus, MachineLoad, describe_problem, loss_text, read_live_status
from whet.report.text_chart import draw_curve, sparkline
from whet.report.timeline import TimelineEntry
from whet.report.watch.status_reader import FileStamp, file_stamp
from whet.run.folder import EVENTS_FILE, RUN_FILE, open_run, run_folders, run_groups, shell_path
from whet.run.follow import LiveHistory
from whet.run.lock import is_locked

# Runs that changed within this time are listed first. They are sorted by name, so that their rows do not move.
ACTIVE_SECONDS = 120.0
MIN_WIDTH, MIN_HEIGHT = 24, 4

_CURVE_POINTS = 200
# Listing folders is slow on network disks, so groups are read less often than runs.
_GROUPS_SECONDS = 5.0
_STATE_STYLES = {
    "running": "bold green",
    "done": "cyan",
    "stopped": "yellow",
    "failed": "bold red",
    "unreadable": "red",
}
# Show a warning if a running run has written no event for this long.
_STALE_SECONDS = 60.0
_LABEL_WIDTH = 9
_BAR_WIDTH = 24
_MAX_GROUPS, _MIN_HEIGHT_FOR_GROUPS = 3, 16
_SPARK_WIDTH = 16
_CURVE_WIDTH, _CURVE_HEIGHT, _MIN_CURVE_HEIGHT = 120, 14, 3
# Columns by priority. A narrow terminal has no space for the last ones.
_COLUMNS = ("state", "step", "loss", "curve", "left", "goal", "updated")


class RunBoard(FrozenModel):
    """The runs that the live view shows at one point in time."""

    folder: Path
    now: float
    num_runs: int
    rows: tuple[LiveStatus, ...]
    """Status of the runs that fit on the screen."""
    first: int = 0
    """Position of the first row among all runs."""
    detailed: int | None = None
    """Index of the row that is shown in detail, which is the newest active run. None if there are no runs."""
    groups: dict[Path, int] = Field(default_factory=dict)
    """Folders that contain runs, such as those of a search, with the number of runs in each."""


@dataclass(slots=True)
class _CachedStatus:
    stamp: FileStamp | None
    status: LiveStatus
    history: LiveHistory | None
    """Open history of the run, which reads only new bytes, or None if the run cannot be read."""


class BoardReader:
    """Reads the runs in a folder, or a single run, repeatedly."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._cache: dict[Path, _CachedStatus] = {}
        self._num_active = 0
        self._groups: dict[Path, int] = {}
        self._grouped_at = -_GROUPS_SECONDS

    def read(self, *, rows: int) -> RunBoard:
        """Return the current state of at most `rows` runs, including the newest active one."""
        now = self._clock()
        paths = self._paths(now)
        position = max(range(self._num_active), key=lambda place: _created(paths[place]), default=0)
        first = max(0, min(position - rows // 2, len(paths) - rows))
        shown = paths[first : first + rows]
        self._cache = {path: self._status(path) for path in shown}
        return RunBoard(
            folder=self._folder,
            now=now,
            num_runs=len(paths),
            rows=tuple(self._cache[path].status for path in shown),
            first=first,
            detailed=position - first if shown else None,
            groups=self._read_groups(now),
        )

    def _read_groups(self, now: float) -> dict[Path, int]:
        """Return the folders that contain runs, updated every few seconds, because this lists many folders."""
        if (self._folder / RUN_FILE).is_file():
            return {}
        if not 0 <= now - self._grouped_at < _GROUPS_SECONDS:
            self._groups, self._grouped_at = run_groups(self._folder), now
        return self._groups

    def _paths(self, now: float) -> list[Path]:
        """Return the paths of active runs by name, then those of the other runs, newest first."""
        if (self._folder / RUN_FILE).is_file():
            return [self._folder.absolute()]
        updated = {path: _updated(_stamp(path)) for path in run_folders(self._folder.absolute())}
        active = [path for path in updated if now - updated[path] < ACTIVE_SECONDS]
        self._num_active = len(active)
        return active + sorted(updated.keys() - set(active), key=lambda path: (-updated[path], path))

    def _status(self, path: Path) -> _CachedStatus:
        stamp, before = _stamp(path), self._cache.get(path)
        history = before.history if before else None
        # Retry an unreadable run each time, because its folder may be in the middle of a copy.
        if before and history is not None and before.stamp == stamp and not _lock_changed(before.status):
            return before
        try:
            run = open_run(path)
            if history is None:
                history = LiveHistory(run)
            else:
                history.refresh()
            return _CachedStatus(stamp, read_live_status(run, history, points=_CURVE_POINTS), history)
        except (WhetError, OSError) as error:
            problem = describe_problem(error)
            status = LiveStatus(path=path, state="unreadable", updated=_updated(stamp), problem=problem)
            return _CachedStatus(stamp, status, None)


def _stamp(path: Path) -> FileStamp | None:
    return file_stamp(f"{path}/{EVENTS_FILE}")


def _updated(stamp: FileStamp | None) -> float:
    return stamp[0] / 1e9 if stamp is not None else 0.0


def _created(path: Path) -> float:
    try:
        return (path / RUN_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _lock_changed(status: LiveStatus) -> bool:
    """Return whether a process has started or died without writing an event."""
    try:
        return is_locked(status.path) != (status.state == "running")
    except (WhetError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class TerminalArea:
    """The size of the terminal, and whether it shows Unicode."""

    width: int
    height: int | None
    """Number of lines, or None for no limit."""
    unicode: bool = True

    def clean(self, text: str) -> str:
        """Return the text as one line, without control characters or characters that the terminal cannot show."""
        text = printable_line(text)
        return text if self.unicode else text.encode("ascii", "replace").decode()

    def fit(self, text: str, cells: int) -> str:
        """Pad or truncate the text to exactly `cells` columns. Wide characters count as two."""
        return set_cell_size(self.clean(text), max(0, cells))


def board_rows(height: int) -> int:
    """Return the number of runs to list on a screen with `height` lines."""
    return max(1, (height - 4) // 3)


def render_board(board: RunBoard, area: TerminalArea) -> list[Text]:
    """Return the lines of the live view: a heading, the runs, and details of one run."""
    lines = [_heading(board, area), *_table(board, area), *_groups(board, area)]
    left = None if area.height is None else area.height - len(lines)
    if board.detailed is not None:
        lines += _details(board.rows[board.detailed], area, now=board.now, height=left)
    lines = lines[: area.height]
    for line in lines:
        line.truncate(area.width)
        line.no_wrap = True
    return lines


def _heading(board: RunBoard, area: TerminalArea) -> Text:
    if board.num_runs == 0:
        hint = "itself" if board.groups else "yet; `whet train text` creates one"
        return Text(area.clean(f"no runs in {board.folder} {hint}"))
    shown = f", {board.first + 1:,} to {board.first + len(board.rows):,}" if len(board.rows) < board.num_runs else ""
    count = f"{board.num_runs:,} run{'s' if board.num_runs != 1 else ''}{shown}"
    right = f"{count}  {time.strftime('%H:%M:%S', time.localtime(board.now))}"
    gap = max(2, area.width - len(right))
    return Text.assemble((area.fit(f"whet watch  {board.folder}", gap - 2) + "  ", "bold"), (right, "dim"))


def _table(board: RunBoard, area: TerminalArea) -> list[Text]:
    if not board.rows:
        return []
    name_width = max(8, min(max(cell_len(row.path.name) for row in board.rows), area.width // 3))
    used, columns = 2 + name_width, []
    for heading in _COLUMNS:
        cells = [_cell(row, heading, now=board.now, area=area) for row in board.rows]
        width = max(len(heading), *(cell_len(text) for text, _ in cells))
        if not any(text for text, _ in cells):
            continue
        if used + 2 + width > area.width:
            break
        used += 2 + width
        columns.append((heading, cells, width))
    header = "  " + area.fit("run", name_width) + "".join("  " + area.fit(head, width) for head, _, width in columns)
    table = [Text(header.rstrip(), style="dim")]
    for place, row in enumerate(board.rows):
        is_detailed = place == board.detailed and board.num_runs > 1
        line = Text("> " if is_detailed else "  ")
        line.append(area.fit(row.path.name, name_width), style="bold" if is_detailed else "")
        for _, cells, width in columns:
            text, style = cells[place]
            line.append("  ")
            line.append(area.fit(text, width), style=style)
        table.append(line)
    return table


def _cell(row: LiveStatus, heading: str, *, now: float, area: TerminalArea) -> tuple[str, str]:
    """Return the text of a cell and its style."""
    if heading == "state":
        return row.state, _STATE_STYLES.get(row.state, "")
    if heading == "step":
        return _progress_text(row), ""
    if heading == "loss":
        return loss_text(row), ""
    if heading == "curve":
        means = [point.mean for point in row.curve.points] if row.curve else []
        return sparkline(means, width=_SPARK_WIDTH, unicode=area.unicode), "cyan"
    if heading == "left":
        return (format_seconds(row.seconds_left) if row.seconds_left is not None else ""), ""
    if heading == "goal":
        return _goal_text(row), ""
    return _ago(now - row.updated), "dim"


def _groups(board: RunBoard, area: TerminalArea) -> list[Text]:
    """Return lines for folders that contain runs, or no lines if the screen is small."""
    if area.height is not None and area.height < _MIN_HEIGHT_FOR_GROUPS:
        return []
    lines = []
    for path, number in list(board.groups.items())[:_MAX_GROUPS]:
        command = f"whet watch {shell_path(path)} --terminal"
        lines.append(Text(area.clean(f"  {path} contains {number:,} more: {command}"), style="dim"))
    left = len(board.groups) - len(lines)
    return [*lines, Text(f"  and {left:,} more such folders", style="dim")] if left else lines


def _details(row: LiveStatus, area: TerminalArea, *, now: float, height: int | None) -> list[Text]:
    """Return the details of a run. The curve uses the space that is left by figures and events."""
    figures = [_line("problem", row.problem, area, style="red")] if row.problem else _figures(row, area, now=now)
    events = [_recent_event(entry, area, now=now) for entry in row.recent]
    if height is None:
        events, curve_height = events[:6], 8
    else:
        left = height - 1 - len(figures)
        few = events[: max(0, min(6, left // 3))]
        curve_height = min(_CURVE_HEIGHT, left - len(few) - 3)
        events = few if curve_height >= _MIN_CURVE_HEIGHT else events[: max(0, left - 1)]
    lines = [Text(), *figures]
    if row.curve is not None and curve_height >= _MIN_CURVE_HEIGHT:
        width = min(area.width, _CURVE_WIDTH)
        curve = draw_curve(row.curve, width=width, height=curve_height, unicode=area.unicode)
        lines += [Text(), *(Text(line, style="cyan") for line in curve)] if curve else []
    return [*lines, Text(), *events] if events else lines


def _figures(row: LiveStatus, area: TerminalArea, *, now: float) -> list[Text]:
    title = row.recipe + (f" on {row.device}" if row.device else "") + (f", epoch {row.epoch}" if row.epoch else "")
    figures = [Text.assemble((area.clean(row.path.name), "bold"), (area.clean(f"  {title}"), ""))]
    if row.total_steps:
        left = f", {format_seconds(row.seconds_left)} left" if row.seconds_left is not None else ""
        text = f"{row.step:,} of {row.total_steps:,}{left}"
        figures.append(_gauge("step", row.step / row.total_steps, text, area, style="green"))
    speed = f"{row.samples_per_second:,.0f} samples/s" if row.samples_per_second else ""
    facts = [loss_text(row) or "none yet", _goal_text(row), speed]
    figures.append(_line("loss", "   ".join(fact for fact in facts if fact), area))
    figures += _load_gauges(row.load, area)
    silent = now - row.updated
    if row.state == "running" and silent > _STALE_SECONDS:
        figures.append(_line("silent", f"no event for {format_seconds(silent)}", area, style="yellow"))
    if row.resume:
        figures.append(_line("resume", row.resume, area, style="yellow"))
    return figures


def _load_gauges(load: MachineLoad, area: TerminalArea) -> list[Text]:
    figures: list[Text] = []
    if load.used_bytes is not None:
        limit, system, total = load.limit_bytes, load.system_bytes, load.system_limit_bytes
        text = format_bytes(load.used_bytes) + (f" of {format_bytes(limit)}" if limit else "")
        text += f", machine {format_bytes(system)} of {format_bytes(total)}" if system is not None and total else ""
        text += f", swap {format_bytes(load.swap_bytes)}" if load.swap_bytes else ""
        text += f", pressure {load.pressure}" if load.pressure else ""
        share = load.used_bytes / limit if limit else None
        figures.append(_gauge("memory", share, text, area, style="red" if load.pressure else None))
    for name, share in (("gpu", load.gpu), ("cpu", load.cpu)):
        if share is not None:
            figures.append(_gauge(name, share, f"{100 * share:.0f} % busy", area, style="green"))
    if load.heat:
        figures.append(_line("heat", load.heat, area, style="" if load.heat.startswith("cool") else "yellow"))
    return figures


def _line(label: str, text: str, area: TerminalArea, *, style: str = "") -> Text:
    return Text.assemble((area.fit(label, _LABEL_WIDTH), "dim"), (area.clean(text), style))


def _gauge(label: str, share: float | None, text: str, area: TerminalArea, *, style: str | None = None) -> Text:
    """Return a bar with its text. Without `style`, the bar turns yellow and then red as it fills up."""
    line = Text(area.fit(label, _LABEL_WIDTH), style="dim")
    cells = min(_BAR_WIDTH, area.width - _LABEL_WIDTH - len(text) - 2)
    if share is not None and cells >= 4:
        filled = round(max(0.0, min(1.0, share)) * cells)
        full, empty = ("\u2501", "\u2500") if area.unicode else ("#", "-")
        color = style or ("red" if share > 0.95 else "yellow" if share > 0.85 else "green")
        line.append(full * filled, style=color)
        line.append(empty * (cells - filled) + "  ", style="dim")
    line.append(area.clean(text), style="default not dim")
    return line


def _recent_event(entry: TimelineEntry, area: TerminalArea, *, now: float) -> Text:
    head = f"{_ago(now - entry.time):>13}  step {entry.step:<9,} "
    is_problem = entry.tone in ("warn", "bad")
    return Text.assemble((head, "dim"), (area.clean(entry.text), "yellow" if is_problem else ""))


def _progress_text(row: LiveStatus) -> str:
    if not row.total_steps:
        return f"{row.step:,}"
    return f"{row.step:,}/{row.total_steps:,} {100 * row.step / row.total_steps:3.0f} %"


def _goal_text(row: LiveStatus) -> str:
    return f"{row.goal} {row.goal_value:.4g}" if row.goal and row.goal_value is not None else ""


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else f"{format_seconds(seconds)} ago"
