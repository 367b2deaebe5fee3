"""CPU time of child processes. Unlike wall-clock time, it does not depend on other processes."""

import resource


def spent_by_children() -> float:
    """Return the CPU seconds of all children that ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
