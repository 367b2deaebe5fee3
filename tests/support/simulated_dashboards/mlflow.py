"""A simulated MLflow: one experiment, one run, its limits on names and batches."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

FILE = Path(os.environ["SIMULATED_DASHBOARD"])


class MlflowException(Exception):  # noqa: N818
    error_code = "INTERNAL_ERROR"


def _metric(key, value, timestamp, step):
    return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)


def _param(key, value):
    return SimpleNamespace(key=key, value=value)


entities = SimpleNamespace(Metric=_metric, Param=_param)


def get_tracking_uri():
    return "simulated"


class MlflowClient:
    def __init__(self):
        self.kept = json.loads(FILE.read_text()) if FILE.exists() else {"rows": [], "config": {}, "runs": 0}

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name) if self.kept.get("project") == name else None

    def create_experiment(self, name):
        self.kept["project"] = name
        return name

    def search_runs(self, experiments, filter_string, max_results):
        is_there = f"'{self.kept.get('id')}'" in filter_string
        return [SimpleNamespace(info=SimpleNamespace(run_id=self.kept["id"]))] if is_there else []

    def create_run(self, experiment, start_time, run_name, tags):
        self.kept |= {"id": tags["whet.run"], "name": run_name, "runs": self.kept["runs"] + 1}
        return SimpleNamespace(info=SimpleNamespace(run_id=self.kept["id"]))

    def update_run(self, run, status):
        self.kept["status"] = status

    def get_run(self, run):
        names = {name for _, values in self.kept["rows"] for name in values}
        return SimpleNamespace(data=SimpleNamespace(metrics=dict.fromkeys(names, 0.0)))

    def get_metric_history(self, run, name):
        return [_metric(name, v[name], 0, step) for step, v in self.kept["rows"] if name in v]

    def log_batch(self, run, metrics=(), params=()):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        for metric in metrics:
            assert re.fullmatch(r"[\w\-. :/]{1,250}", metric.key, re.ASCII), metric.key
            self.kept["rows"].append([metric.step, {metric.key: metric.value}])
        self.kept["config"] |= {param.key: param.value for param in params}

    def set_terminated(self, run, status):
        self.kept["ended"] = status
        FILE.write_text(json.dumps(self.kept))
