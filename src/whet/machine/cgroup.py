"""How much of the machine does the container or service we are in leave us? Control groups, versions 1 and 2."""

from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from whet.machine.programs import complete_lines, positive_number, whole_number

Number = TypeVar("Number", int, float)


class CgroupLimits(NamedTuple):
    processors: float | None = None
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The tightest limits of our control group and all above it; None where nothing is limited."""
    groups = parse_cgroup_membership(read_text(root / "proc/self/cgroup"))
    mounted = root / "sys/fs/cgroup"
    found = CgroupLimits()
    for folder in _cgroup_folders(mounted, groups.get("")):
        found = tightest(found, read_cgroup_v2(folder))
    for folder in _cgroup_folders(mounted / "memory", groups.get("memory")):
        found = tightest(found, CgroupLimits(None, *_memory_v1(folder)))
    for name in ("cpu", "cpu,cpuacct"):
        for folder in _cgroup_folders(mounted / name, groups.get("cpu")):
            found = tightest(found, CgroupLimits(_processors_v1(folder)))
    return found


def parse_cgroup_membership(text: str | None) -> dict[str, str]:
    """/proc/self/cgroup: the path of our group for each controller; version 2 stands under the empty name."""
    groups: dict[str, str] = {}
    for line in complete_lines(text):
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and number.isdigit() and path.startswith("/"):
            for name in controllers.split(","):
                groups[name] = path
    return groups


def parse_cpu_max(text: str | None) -> float | None:
    """Processors of time in "200000 100000" (2.0); None for "max"."""
    quota, _, period = (text or "").strip().partition(" ")
    return _share(whole_number(quota), whole_number(period))


def parse_memory_limit(text: str | None) -> int | None:
    """Bytes, or None for "max" and for version 1's "no limit", a number near 2**63 with more digits than we take."""
    return positive_number(text)


def parse_memory_stat(text: str | None, key: str) -> int | None:
    """One value of memory.stat."""
    for line in complete_lines(text):
        name, _, value = line.partition(" ")
        if name == key:
            return whole_number(value)
    return None


def read_cgroup_v2(folder: Path) -> CgroupLimits:
    """The limits one folder of version 2 states."""
    limit = parse_memory_limit(read_text(folder / "memory.max"))
    used = whole_number(read_text(folder / "memory.current"))
    cached = parse_memory_stat(read_text(folder / "memory.stat"), "inactive_file")
    return CgroupLimits(parse_cpu_max(read_text(folder / "cpu.max")), limit, _memory_left(limit, used, cached))


def _memory_v1(folder: Path) -> tuple[int | None, int | None]:
    limit = parse_memory_limit(read_text(folder / "memory.limit_in_bytes"))
    used = whole_number(read_text(folder / "memory.usage_in_bytes"))
    cached = parse_memory_stat(read_text(folder / "memory.stat"), "total_inactive_file")
    return limit, _memory_left(limit, used, cached)


def _processors_v1(folder: Path) -> float | None:
    quota = whole_number(read_text(folder / "cpu.cfs_quota_us"))
    return _share(quota, whole_number(read_text(folder / "cpu.cfs_period_us")))


def _share(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period else None


def _memory_left(limit: int | None, used: int | None, cached: int | None) -> int | None:
    """What may still be taken; file pages nobody used lately are given back when asked for."""
    if limit is None or used is None:
        return None
    return max(0, limit - max(0, used - (cached or 0)))


def tightest(one: CgroupLimits, other: CgroupLimits) -> CgroupLimits:
    """The smaller of each limit."""
    return CgroupLimits(
        min_known(one.processors, other.processors),
        min_known(one.memory_bytes, other.memory_bytes),
        min_known(one.memory_left_bytes, other.memory_left_bytes),
    )


def min_known(one: Number | None, other: Number | None) -> Number | None:
    """The smaller of two numbers, where None means that nothing is known."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _cgroup_folders(mounted: Path, group: str | None) -> list[Path]:
    """Our group's folder and those above it: each may set a limit. A path from outside a container is not there."""
    if group is None or ".." in group:
        return []
    steps = PurePosixPath(group.strip("/"))
    return [mounted / step for step in (steps, *steps.parents)]


def read_text(path: Path) -> str | None:
    """What the file says, or None if it is not there, not ours to read, or no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
