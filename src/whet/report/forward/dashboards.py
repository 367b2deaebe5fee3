"""The dashboards a run can be forwarded to: W&B, Trackio and MLflow."""

import contextlib
import importlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from whet.base.errors import UsageError, WhetError, closest_match
from whet.run import durable
from whet.run.disk import read_regular_file
from whet.run.folder import Run

Parameter = str | int | float | bool


class UnreachableError(Exception):
    """The dashboard did not answer; it may do so later."""


@dataclass(frozen=True, slots=True)
class DashboardRow:
    """The numbers of one step."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardedState:
    """What the dashboard has of the run already: up to which step, for all numbers or by name."""

    step: int = -1
    by_name: Mapping[str, int] = field(default_factory=dict)

    def news(self, row: DashboardRow) -> DashboardRow | None:
        """What of a row is new; None where nothing is."""
        values = {name: v for name, v in row.values.items() if row.step > self.by_name.get(name, self.step)}
        return DashboardRow(row.step, row.time, values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """What is told of a run once."""

    id: str
    name: str
    project: str
    created: float
    parameters: Mapping[str, Parameter]


class Dashboard(Protocol):
    """One dashboard. Its calls may take their time: only the forwarding process waits."""

    most_rows: int
    """So many are sent at once."""

    def open(self, about: RunDescription) -> ForwardedState:
        """Makes the run there, or finds it again."""

    def send(self, rows: Sequence[DashboardRow]) -> None:
        """Hands over rows, in the order of their steps; UnreachableError when it may work later."""

    def close(self, state: str | None) -> None:
        """Ends it; `state` is how the run ended, or None when it goes on and only the forwarding ends."""

    def where(self) -> str:
        """Where the run can be seen."""


def describe_run(run: Run, *, project: str) -> RunDescription:
    """What is told of a run: its config, and the settings of its plan."""
    settings = run.plan.get("settings")
    plan = {
        f"plan.{name}": setting.get("value")
        for name, setting in (settings.items() if isinstance(settings, Mapping) else ())
        if isinstance(setting, Mapping)
    }
    told = {"recipe": run.header.recipe, "whet": run.header.whet, **run.config, **plan}
    return RunDescription(
        id=run.header.id,
        name=run.path.name,
        project=project,
        created=run.header.created,
        parameters=dict(_flatten(told)),
    )


def import_library(name: str) -> Any:
    """The dashboard's library, or a clear word that it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WhetError(f"{name} cannot be loaded", got=str(error), try_=f"pip install {name}") from None


def _flatten(values: Mapping[str, Any], *, above: str = "") -> Iterator[tuple[str, Parameter]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, above=f"{above}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield above + name, value
        elif value is not None:
            yield above + name, str(value)


_MLFLOW_TAG = "whet.run"
_MAX_METRICS, _MAX_PARAMETERS = 1_000, 100
_MAX_NAME, _MAX_VALUE = 250, 500
_MLFLOW_STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_RETRYABLE = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


class Mlflow:
    """One run of MLflow; it is found again by a tag that holds the id of ours."""

    most_rows = 100

    def __init__(self) -> None:
        self._mlflow = import_library("mlflow")
        self._client: Any = self._mlflow.MlflowClient()
        self._run = self._where = ""
        self._taken = 0
        """How many numbers of the rows at hand it has; the same rows come again when it did not answer."""

    def open(self, about: RunDescription) -> ForwardedState:
        with self._answering():
            return self._open(about)

    def _open(self, about: RunDescription) -> ForwardedState:
        experiment = self._client.get_experiment_by_name(about.project)
        where = experiment.experiment_id if experiment else self._client.create_experiment(about.project)
        self._where = f"MLflow ({self._mlflow.get_tracking_uri()}, experiment {about.project})"
        found = self._client.search_runs([where], filter_string=f"tags.`{_MLFLOW_TAG}` = '{about.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return ForwardedState(by_name=self._last_steps())
        made = self._client.create_run(
            where, start_time=int(about.created * 1000), run_name=about.name, tags={_MLFLOW_TAG: about.id}
        )
        self._run = made.info.run_id
        parameters = [
            self._mlflow.entities.Param(_mlflow_name(name), str(value)[:_MAX_VALUE])
            for name, value in about.parameters.items()
        ]
        for start in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MAX_PARAMETERS])
        return ForwardedState()

    def send(self, rows: Sequence[DashboardRow]) -> None:
        metrics = [
            self._mlflow.entities.Metric(_mlflow_name(name), value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        while self._taken < len(metrics):
            with self._answering():
                self._client.log_batch(self._run, metrics=metrics[self._taken : self._taken + _MAX_METRICS])
            self._taken += _MAX_METRICS
        self._taken = 0

    def close(self, state: str | None) -> None:
        if self._run and state is not None:
            with self._answering():
                self._client.set_terminated(self._run, status=_MLFLOW_STATES.get(state, "FINISHED"))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            if getattr(error, "error_code", _RETRYABLE[0]) in _RETRYABLE:
                raise UnreachableError(str(error).partition("\n")[0][:200]) from error
            raise

    def where(self) -> str:
        return self._where

    def _last_steps(self) -> dict[str, int]:
        names = self._client.get_run(self._run).data.metrics
        return {name: max(point.step for point in self._client.get_metric_history(self._run, name)) for name in names}


def _mlflow_name(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MAX_NAME].strip("/. ") or "_"


_LONGEST_WAIT_SECONDS = 30.0


class Trackio:
    """One run of Trackio; its name ends with a part of our id, so that it is found again."""

    most_rows = 1_000

    def __init__(self) -> None:
        self._trackio = import_library("trackio")
        self._run: Any = None
        self._where = ""
        self._logged = -1

    def open(self, about: RunDescription) -> ForwardedState:
        self._run = self._trackio.init(
            project=about.project,
            name=f"{about.name}-{about.id[:8]}",
            config=dict(about.parameters),
            resume="allow",
            embed=False,
            # They would tell of this process, and not of the training.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._where = f"Trackio (project {about.project}); `trackio show --project {about.project}` shows it"
        # It counts on from the last step it has: one row a step, so that tells all.
        return ForwardedState(step=getattr(self._run, "_next_step", 0) - 1)

    def send(self, rows: Sequence[DashboardRow]) -> None:
        for row in rows:
            if row.step <= self._logged:
                continue  # Given to it already, and not written in time.
            self._run.log(dict(row.values), step=row.step)
            self._logged = row.step
        # It keeps what is logged in memory, and writes twice a second.
        until = time.monotonic() + _LONGEST_WAIT_SECONDS
        while getattr(self._run, "_queued_logs", None) or getattr(self._run, "_sending_batch", None):
            if time.monotonic() > until:
                raise UnreachableError("Trackio has not written what it was given")
            time.sleep(0.05)

    def close(self, state: str | None) -> None:  # noqa: ARG002
        if self._run is not None:
            # By its own door: left open, it would end the run once more when the process ends, and print.
            self._trackio.finish()

    def where(self) -> str:
        return self._where


_EXIT_CODES = {"done": 0, "stopped": 130, "failed": 1}


class Wandb:
    """One run of W&B that has our id. A row of theirs is a step, and none can be added behind."""

    most_rows = 1_000

    def __init__(self) -> None:
        self._wandb = import_library("wandb")
        self._run: Any = None
        self._note: Path | None = None

    def open(self, about: RunDescription) -> ForwardedState:
        self._run = self._wandb.init(
            project=about.project,
            id=about.id,
            name=about.name,
            config=dict(about.parameters),
            resume="allow",
            # What it collects by itself would tell of this process, and not of the training.
            settings=self._wandb.Settings(
                console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, quiet=True
            ),
        )
        if not self._run.offline:
            return ForwardedState(step=self._run.starting_step - 1)
        # Offline nobody knows what was handed over before, so it is noted beside what wandb wrote.
        folder = Path(self._run.settings.wandb_dir)
        self._note = folder / f"whet-{about.id}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return ForwardedState(step=int(json.loads(read_regular_file(self._note))["step"]))
        return ForwardedState()

    def send(self, rows: Sequence[DashboardRow]) -> None:
        for row in rows:
            # _timestamp: when it happened, and not when it was forwarded.
            self._run.log({**row.values, "_timestamp": row.time}, step=row.step, commit=True)
        if self._note is not None and rows:
            # An answer from wandb's own process: it has all that was logged before the question.
            _ = self._run.step
            durable.write_file(self._note, data=json.dumps({"step": rows[-1].step}).encode())

    def close(self, state: str | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES.get(state or "stopped", 0))

    def where(self) -> str:
        if self._run.offline:
            return f"W&B, offline; to send it on: wandb sync {Path(self._run.settings.sync_dir)}"
        return f"W&B, {self._run.url}"


DASHBOARDS: dict[str, Callable[[], Dashboard]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def open_dashboard(name: str) -> Dashboard:
    """The dashboard of a name."""
    if name not in DASHBOARDS:
        meant = closest_match(name, DASHBOARDS)
        raise UsageError("no such dashboard", got=name, try_=f"--to {meant}" if meant else " or ".join(DASHBOARDS))
    return DASHBOARDS[name]()
