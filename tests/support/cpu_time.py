"""How much of a processor did child processes take? Unlike the time on the clock it is theirs, whoever runs beside."""

import resource


def spent_by_children() -> float:
    """Seconds of all that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
