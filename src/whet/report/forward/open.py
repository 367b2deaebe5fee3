"""Which dashboards can a run be forwarded to?"""

from collections.abc import Callable

from whet.base.errors import UsageError, nearest
from whet.report.forward.target import Target
from whet.report.forward.to_mlflow import Mlflow
from whet.report.forward.to_trackio import Trackio
from whet.report.forward.to_wandb import Wandb

TARGETS: dict[str, Callable[[], Target]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def open_target(name: str) -> Target:
    """The dashboard of a name."""
    if name not in TARGETS:
        meant = nearest(name, TARGETS)
        raise UsageError("no such dashboard", got=name, try_=f"--to {meant}" if meant else " or ".join(TARGETS))
    return TARGETS[name]()
