"""How much a test tries: a part in the gate, everything in `make test-all`."""

import os

IS_GATE = not os.environ.get("WHET_SEARCH")


def amount(gate: int, everything: int) -> int:
    """Return the number of repetitions, for tests whose cost is their number."""
    return gate if IS_GATE else everything
