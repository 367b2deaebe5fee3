"""Is a result the one that it should be? The finding of one comparison."""

from typing import Any

from whet.doctor.case import Finding, differs, good
from whet.verify.agreement import CLOSE, error_of


def compared(found: Any, expected: Any, *, tolerance: float = CLOSE, right: str, wrong: str) -> Finding:
    """A finding from one comparison."""
    error = error_of(found, expected)
    if error <= tolerance:
        return good(right, error=error)
    return differs(f"{wrong}: largest relative error {error:.2g}", error=error, tolerance=tolerance)
