"""Confidence intervals of means from Student's t distribution, in pure Python."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

# The 97.5 % quantiles of Student's t for 1 to 29 degrees of freedom. They give two-sided 95 % intervals.
_T: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
# The 97.5 % quantile of the standard normal distribution, which Student's t approaches.
_NORMAL = 1.959964


def student_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    A two-sided 95 % confidence interval extends this many standard errors to each side of the mean.

    >>> student_t(1), round(student_t(30), 3), round(student_t(100), 3)
    (12.706, 2.042, 1.984)
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    # The first terms of the Cornish-Fisher expansion. The error is below 0.0002 for 30 or more degrees of freedom.
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, or None for fewer than two values.

    >>> low, high = mean_interval([0.8, 0.9])
    >>> round(low, 3), round(high, 3)
    (0.215, 1.485)
    """
    if len(values) < 2:
        return None
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half
