"""The supported dashboards: W&B and MLflow."""

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from whet.base.errors import UsageError, WhetError, closest_match, first_line
from whet.config.sources import flatten
from whet.run import durable
from whet.run.disk import read_regular_file
from whet.run.folder import Run

Parameter = str | int | float | bool


class UnreachableError(Exception):
    """The dashboard does not respond. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class DashboardRow:
    """The metrics of one step, for the dashboard."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardedState:
    """The newest step that the dashboard already has, for all metrics (`step`) or for each metric (`by_name`)."""

    step: int = -1
    by_name: Mapping[str, int] = field(default_factory=dict)

    def new_part(self, row: DashboardRow) -> DashboardRow | None:
        """Return the part of a row that the dashboard does not have yet, or None if it has all of it."""
        values = {name: v for name, v in row.values.items() if row.step > self.by_name.get(name, self.step)}
        return DashboardRow(row.step, row.time, values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """The description of a run, which is sent to the dashboard once."""

    id: str
    name: str
    project: str
    created: float
    parameters: Mapping[str, Parameter]


class Dashboard(Protocol):
    """The interface of a dashboard. Its methods may be slow, because only the forwarding process waits for them."""

    max_rows: int
    """Maximum rows per `send`."""

    def open(self, about: RunDescription) -> ForwardedState:
        """Create the run in the dashboard, or find the existing one."""

    def send(self, rows: Sequence[DashboardRow]) -> None:
        """Send rows in the order of their steps. Raise UnreachableError if a retry may succeed."""

    def close(self, state: str | None) -> None:
        """Close the connection. `state` is the final state of the run, or None if only forwarding ends."""

    def where(self) -> str:
        """Return the address at which the run can be viewed."""


def describe_run(run: Run, *, project: str) -> RunDescription:
    """Return the description of a run: its configuration, and the settings of its plan."""
    settings = run.plan.get("settings")
    plan = {
        f"plan.{name}": setting.get("value")
        for name, setting in (settings.items() if isinstance(settings, Mapping) else ())
        if isinstance(setting, Mapping)
    }
    values = flatten({"recipe": run.header.recipe, "whet": run.header.whet, **run.config, **plan})
    return RunDescription(
        id=run.header.id,
        name=run.path.name,
        project=project,
        created=run.header.created,
        parameters={
            name: value if isinstance(value, str | int | float) else str(value)
            for name, value in values.items()
            if value is not None
        },
    )


def import_library(name: str) -> Any:
    """Import the library of a dashboard. Raise WhetError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WhetError(f"cannot import {name}", got=str(error), try_=f"pip install {name}") from None


_MLFLOW_TAG = "whet.run"
_MAX_METRICS, _MAX_PARAMETERS = 1_000, 100
_MAX_NAME, _MAX_VALUE = 250, 500
_MLFLOW_STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_RETRYABLE = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


class Mlflow:
    """MLflow at MLFLOW_TRACKING_URI: a folder, database or server. The run is identified by a tag with its id."""

    max_rows = 100

    def __init__(self) -> None:
        self._mlflow = import_library("mlflow")
        self._client: Any = self._mlflow.MlflowClient()
        self._run = self._where = ""
        self._num_sent = 0
        """How many numbers of the current rows were accepted. A retry with the same rows skips them."""

    def open(self, about: RunDescription) -> ForwardedState:
        with self._retryable_errors():
            return self._open(about)

    def _open(self, about: RunDescription) -> ForwardedState:
        experiment = self._client.get_experiment_by_name(about.project)
        where = experiment.experiment_id if experiment else self._client.create_experiment(about.project)
        self._where = f"MLflow ({self._mlflow.get_tracking_uri()}, experiment {about.project})"
        matches = self._client.search_runs([where], filter_string=f"tags.`{_MLFLOW_TAG}` = '{about.id}'", max_results=1)
        if matches:
            self._run = matches[0].info.run_id
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
        while self._num_sent < len(metrics):
            with self._retryable_errors():
                self._client.log_batch(self._run, metrics=metrics[self._num_sent : self._num_sent + _MAX_METRICS])
            self._num_sent += _MAX_METRICS
        self._num_sent = 0

    def close(self, state: str | None) -> None:
        if self._run and state is not None:
            with self._retryable_errors():
                self._client.set_terminated(self._run, status=_MLFLOW_STATES.get(state, "FINISHED"))

    @contextlib.contextmanager
    def _retryable_errors(self) -> Iterator[None]:
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            if getattr(error, "error_code", _RETRYABLE[0]) in _RETRYABLE:
                raise UnreachableError(first_line(error)) from error
            raise

    def where(self) -> str:
        return self._where

    def _last_steps(self) -> dict[str, int]:
        names = self._client.get_run(self._run).data.metrics
        return {name: max(point.step for point in self._client.get_metric_history(self._run, name)) for name in names}


def _mlflow_name(name: str) -> str:
    """Replace the characters of a metric name that MLflow does not accept."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MAX_NAME].strip("/. ") or "_"


_EXIT_CODES = {"done": 0, "stopped": 130, "failed": 1}


class Wandb:
    """Weights & Biases, online, or offline with WANDB_MODE=offline and a later `wandb sync`.

    The W&B run has the id of the run. Each row is a W&B step, and W&B does not accept steps before the last one.
    """

    max_rows = 1_000

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
            # Disable the data that W&B collects automatically, because it would describe the forwarding process.
            settings=self._wandb.Settings(
                console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, quiet=True
            ),
        )
        if not self._run.offline:
            return ForwardedState(step=self._run.starting_step - 1)
        # An offline run does not record which rows were sent, so store the last step next to the files of wandb.
        folder = Path(self._run.settings.wandb_dir)
        self._note = folder / f"whet-{about.id}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return ForwardedState(step=int(json.loads(read_regular_file(self._note))["step"]))
        return ForwardedState()

    def send(self, rows: Sequence[DashboardRow]) -> None:
        for row in rows:
            # Set _timestamp to the time of the event. By default it is the time of forwarding.
            self._run.log({**row.values, "_timestamp": row.time}, step=row.step, commit=True)
        if self._note is not None and rows:
            # Querying the step waits until the wandb process has received all earlier rows.
            _ = self._run.step
            durable.write_file(self._note, data=json.dumps({"step": rows[-1].step}).encode())

    def close(self, state: str | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES.get(state or "stopped", 0))

    def where(self) -> str:
        if self._run.offline:
            return f"W&B, offline; to upload it: wandb sync {Path(self._run.settings.sync_dir)}"
        return f"W&B, {self._run.url}"


DASHBOARDS: dict[str, Callable[[], Dashboard]] = {"wandb": Wandb, "mlflow": Mlflow}


def open_dashboard(name: str) -> Dashboard:
    """Return the dashboard with this name."""
    if name not in DASHBOARDS:
        meant = closest_match(name, DASHBOARDS)
        raise UsageError("unknown dashboard", got=name, try_=f"--to {meant}" if meant else " or ".join(DASHBOARDS))
    return DASHBOARDS[name]()
