"""MLflow, wherever MLFLOW_TRACKING_URI leads: a file, a database or a server."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from whet.report.forward.target import About, Held, Row, UnreachableError, library

_TAG = "whet.run"
_MOST_METRICS, _MOST_PARAMETERS = 1_000, 100
_MOST_NAME, _MOST_VALUE = 250, 500
_STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_LATER = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


class Mlflow:
    """One run of MLflow; it is found again by a tag that holds the id of ours."""

    most_rows = 100

    def __init__(self) -> None:
        self._mlflow = library("mlflow")
        self._client: Any = self._mlflow.MlflowClient()
        self._run = self._where = ""
        self._taken = 0
        """How many numbers of the rows at hand it has; the same rows come again when it did not answer."""

    def open(self, about: About) -> Held:
        with self._answering():
            return self._open(about)

    def _open(self, about: About) -> Held:
        experiment = self._client.get_experiment_by_name(about.project)
        where = experiment.experiment_id if experiment else self._client.create_experiment(about.project)
        self._where = f"MLflow ({self._mlflow.get_tracking_uri()}, experiment {about.project})"
        found = self._client.search_runs([where], filter_string=f"tags.`{_TAG}` = '{about.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return Held(by_name=self._last_steps())
        made = self._client.create_run(
            where, start_time=int(about.created * 1000), run_name=about.name, tags={_TAG: about.id}
        )
        self._run = made.info.run_id
        parameters = [
            self._mlflow.entities.Param(_name(name), str(value)[:_MOST_VALUE])
            for name, value in about.parameters.items()
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MOST_PARAMETERS])
        return Held()

    def send(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._mlflow.entities.Metric(_name(name), value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        while self._taken < len(metrics):
            with self._answering():
                self._client.log_batch(self._run, metrics=metrics[self._taken : self._taken + _MOST_METRICS])
            self._taken += _MOST_METRICS
        self._taken = 0

    def close(self, state: str | None) -> None:
        if self._run and state is not None:
            with self._answering():
                self._client.set_terminated(self._run, status=_STATES.get(state, "FINISHED"))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            if getattr(error, "error_code", _LATER[0]) in _LATER:
                raise UnreachableError(str(error).partition("\n")[0][:200]) from error
            raise

    def where(self) -> str:
        return self._where

    def _last_steps(self) -> dict[str, int]:
        names = self._client.get_run(self._run).data.metrics
        return {name: max(point.step for point in self._client.get_metric_history(self._run, name)) for name in names}


def _name(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MOST_NAME].strip("/. ") or "_"
