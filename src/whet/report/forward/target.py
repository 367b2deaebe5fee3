"""What must a dashboard be able to do so that runs can be forwarded to it, and what is it told of a run?"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from whet.base.errors import WhetError
from whet.run.folder import Run

Parameter = str | int | float | bool


class UnreachableError(Exception):
    """The dashboard did not answer; it may do so later."""


@dataclass(frozen=True, slots=True)
class Row:
    """The numbers of one step."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What the dashboard has of the run already: up to which step, for all numbers or by name."""

    step: int = -1
    by_name: Mapping[str, int] = field(default_factory=dict)

    def news(self, row: Row) -> Row | None:
        """What of a row is new; None where nothing is."""
        values = {name: v for name, v in row.values.items() if row.step > self.by_name.get(name, self.step)}
        return Row(row.step, row.time, values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What is told of a run once."""

    id: str
    name: str
    project: str
    created: float
    parameters: Mapping[str, Parameter]


class Target(Protocol):
    """One dashboard. Its calls may take their time: only the forwarding process waits."""

    most_rows: int
    """So many are sent at once."""

    def open(self, about: About) -> Held:
        """Makes the run there, or finds it again."""

    def send(self, rows: Sequence[Row]) -> None:
        """Hands over rows, in the order of their steps; UnreachableError when it may work later."""

    def close(self, state: str | None) -> None:
        """Ends it; `state` is how the run ended, or None when it goes on and only the forwarding ends."""

    def where(self) -> str:
        """Where the run can be seen."""


def about(run: Run, *, project: str) -> About:
    """What is told of a run: its config, and the settings of its plan."""
    settings = run.plan.get("settings")
    plan = {
        f"plan.{name}": setting.get("value")
        for name, setting in (settings.items() if isinstance(settings, Mapping) else ())
        if isinstance(setting, Mapping)
    }
    told = {"recipe": run.header.recipe, "whet": run.header.whet, **run.config, **plan}
    return About(
        id=run.header.id,
        name=run.path.name,
        project=project,
        created=run.header.created,
        parameters=dict(_flat(told)),
    )


def library(name: str) -> Any:
    """The dashboard's library, or a clear word that it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WhetError(f"{name} cannot be loaded", got=str(error), try_=f"pip install {name}") from None


def _flat(values: Mapping[str, Any], *, above: str = "") -> Iterator[tuple[str, Parameter]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, above=f"{above}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield above + name, value
        elif value is not None:
            yield above + name, str(value)
