"""Check twelve models for several releases of torch on a Mac, and print a table of what is found.

python benchmarks/check_releases.py
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import memory_models

from whet.api.verify import check
from whet.verify.preflight.check import PreflightResult

RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
RECIPES = ("text", "chat", "puzzle", "hex")
MODELS: dict[str, str | Callable[[], Any]] = {
    **{case.name: partial(case.make, case.size) for case in memory_models.CASES},
    "speech, LSTM and CTC": "examples/check_lstm_ctc.py",
    **{f"recipe {name}": name for name in RECIPES},
}


def main() -> None:
    print("| model | " + " | ".join(f"torch {release}" for release in RELEASES) + " |")
    print("| --- |" + " --- |" * len(RELEASES))
    for name, model in MODELS.items():
        cells = []
        for release in RELEASES:
            cells.append(summary(check(model, device="mps", torch=release)))
            gc.collect()
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def summary(result: PreflightResult) -> str:
    """Return the kinds of findings, such as "missing-operator x2"."""
    kinds = [finding.id.removeprefix("known-fault/") for finding in result.findings if finding.severity != "note"]
    counts = {kind: kinds.count(kind) for kind in kinds}
    return ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in counts.items()) or "nothing"


if __name__ == "__main__":
    main()
