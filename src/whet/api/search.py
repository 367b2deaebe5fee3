"""`whet.search`: hyperparameter search over a recipe's options. Every trial is a run."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from whet.base.errors import UsageError
from whet.config.goal import resolve_mode
from whet.config.options import MAX_SEEDS
from whet.config.resolve import read_config, resolve_config
from whet.config.sources import as_argument, flatten, parse_args
from whet.hpo import results, samplers
from whet.hpo.results import collect_results
from whet.hpo.search_config import SearchConfig, check_same_search, read_search_config, write_search_config
from whet.hpo.space import SearchSpace, read_space
from whet.hpo.storage import check_address, open_storage, without_password
from whet.hpo.study import ClaimedTrial, SearchStudy
from whet.hpo.worker import (
    FinishedTrial,
    Log,
    TrialKind,
    TrialTask,
    WorkerConfig,
    devices_for,
    machine_name,
    run_together,
    run_worker,
)
from whet.recipes.recipe import BUILT_IN, load_recipe
from whet.run import durable
from whet.run.folder import RUN_FILE, next_run_path
from whet.run.search_result import SearchResult, write_search

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_TRIAL_TARGET = "whet.api.trial:train_trial"
# File systems allow names of 255 bytes; the rest is a margin.
_MAX_NAME_BYTES = 200
# Attribute of the Optuna study that holds a copy of the configuration, for machines that share only the storage.
_STUDY_ATTRIBUTE = "whet"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSearch:
    """The validated arguments of a search, before anything is written to disk."""

    recipe: str
    """The recipe as a name or an absolute path that the process of a trial can load."""
    config: SearchConfig
    folder: Path
    device: str = "auto"

    def num_trials(self, trials: int) -> int:
        """Return the number of trials to run: `trials`, or fewer if a grid has fewer points."""
        points = samplers.num_points(self.config.sampler, self.config.space)
        return trials if points is None else min(trials, points)


def search(
    what: str,
    args: Iterable[str] = (),
    *,
    trials: int = 20,
    timeout: float | None = None,
    storage: str | None = None,
    jobs: int = 1,
    file: Path | None = None,
    name: str | None = None,
    root: Path = Path("runs"),
    subset: float = 1.0,
    seeds: int = 3,
    sampler: str = "TPESampler",
    pruner: str = "PercentilePruner",
    device: str = "auto",
    log: Log | None = None,
    on_trial: Callable[[FinishedTrial], None] | None = None,
    stop: threading.Event | None = None,
) -> SearchResult:
    """Search the options of a recipe for the best settings; the same call with the same `name` resumes.

    Args:
        what: A recipe, or a Python file.
        args: Ranges and lists to search ("lr=1e-5..1e-3:log", "arch.layers=[1,2]"), and options that all trials share
            ("epochs=2").
        trials: Trials in total, over all processes.
        timeout: Seconds after which no further trial starts.
        storage: None for a journal file in the search's folder, or "postgresql+psycopg://..." for several machines.
        jobs: Trials that train at the same time.
        file: A config file with options and ranges.
        name: The folder's name below `root`.
        subset: Fraction of the training split that trials use.
        seeds: How many other seeds the best settings are retrained with.
        sampler, pruner: Names of Optuna's samplers and pruners.
        device: As for `whet.train`.
        log: Receives messages.
        on_trial: Called when a trial ends.
        stop: Set it to stop the search.

    >>> whet.search("text", ["lr=1e-5..1e-2:log"], trials=12).winner.settings  # doctest: +SKIP
    {'lr': 0.0021}
    """
    prepared = prepare_search(
        what,
        args,
        file=file,
        name=name,
        root=root,
        subset=subset,
        seeds=seeds,
        sampler=sampler,
        pruner=pruner,
        device=device,
    )
    return run_search(
        prepared, trials=trials, timeout=timeout, storage=storage, jobs=jobs, log=log, on_trial=on_trial, stop=stop
    )


def prepare_search(
    what: str,
    args: Iterable[str],
    *,
    file: Path | None = None,
    name: str | None = None,
    root: Path = Path("runs"),
    subset: float = 1.0,
    seeds: int = 3,
    sampler: str = "TPESampler",
    pruner: str = "PercentilePruner",
    device: str = "auto",
) -> PreparedSearch:
    """Parse and validate the arguments of a search."""
    recipe = load_recipe(what)
    from_file = flatten(dict(read_config(recipe.Config, file))) if file else {}
    space, fixed = read_space(recipe.Config, args, file=from_file)
    resolved = resolve_config(recipe.Config, fixed)
    recipe.describe(resolved.config)
    if not 0 < subset <= 1:
        raise UsageError("a subset is a fraction of the training split", got=str(subset), try_="--subset 0.2")
    if not 0 <= seeds <= MAX_SEEDS:
        raise UsageError(f"seeds must be from 0 to {MAX_SEEDS:,}", got=str(seeds), try_="--seeds 3")
    _check_name(name)
    if not re.fullmatch(r"auto|mps|cpu|fake|cuda(:[0-9]+)?", device):
        raise UsageError("no such device", got=device, try_="auto, mps, cuda, cuda:1 or cpu")
    folder = (root / name if name else next_run_path(root, recipe=f"{recipe.name}-search")).absolute()
    goal = recipe.selected_goal(resolved.config)
    if goal is None:
        raise UsageError("a search needs a metric to optimize", got=f"{what} has no goal", try_='goal = "accuracy"')
    config = SearchConfig(
        name=folder.name,
        recipe=recipe.name,
        goal=goal,
        is_higher_better=resolve_mode(goal, recipe.mode) == "max",
        resource=recipe.resource or ("epochs" if resolved.config.max_steps is None else "steps"),
        space=space,
        fixed=parse_args(fixed).values,
        subset=subset,
        seed=resolved.config.seed,
        seeds=seeds,
        sampler=sampler,
        pruner=pruner,
    )
    # Report unknown names and invalid combinations before the first trial starts.
    samplers.make_sampler(sampler, space, seed=0, number=0)
    samplers.make_pruner(pruner)
    return PreparedSearch(recipe=_absolute_recipe(what), config=config, folder=folder, device=device)


def run_search(
    prepared: PreparedSearch,
    *,
    trials: int,
    timeout: float | None = None,
    storage: str | None = None,
    jobs: int = 1,
    log: Log | None = None,
    on_trial: Callable[[FinishedTrial], None] | None = None,
    stop: threading.Event | None = None,
) -> SearchResult:
    """Run trials until the search is complete, and write its result."""
    started = time.monotonic()
    _check_limits(trials=trials, jobs=jobs, timeout=timeout)
    config, folder = prepared.config, prepared.folder
    log = log or (lambda _line: None)
    max_trials = prepared.num_trials(trials)
    if max_trials < trials:
        log(f"--trials {trials}: the grid has only {max_trials} points")
    saved = read_search_config(folder)
    if saved is not None:
        check_same_search(saved, config, where=str(folder))
    check_address(storage)
    if (folder / RUN_FILE).exists():
        raise UsageError("the folder contains a run, not a search", got=str(folder), try_="another --name")
    devices = devices_for(prepared.device, jobs=jobs, log=log)
    durable.make_directory(folder)
    earlier_seconds = _earlier_seconds(folder)
    # Remove the folder if an error occurs before anything is written to it.
    with _remove_if_empty(folder), open_storage(storage, folder=folder) as opened:
        if saved is not None:
            _check_storage(opened, config, url=storage)
        study = _open_study(opened, config)
        _check_study(opened, config)
        if saved is None:
            write_search_config(folder, config)
        seed_study = _open_seed_study(opened, config)
        runner = _TrialRunner(
            prepared=prepared,
            devices=devices,
            on_trial=on_trial or (lambda _trial: None),
            stop=stop or threading.Event(),
            deadline=None if timeout is None else started + timeout,
        )
        runner.run(study, lambda claimed: (dict(claimed.trial.params), config.seed), max_trials=max_trials)
        _confirm_best(runner, study, seed_study, log=log)
        result = collect_results(
            config,
            study,
            seed_study,
            storage=without_password(storage),
            seconds=earlier_seconds + time.monotonic() - started,
        )
    write_search(folder, result)
    return result


SeededSettings = Callable[[ClaimedTrial], tuple[dict[str, Any], int]]
"""Return the settings and the seed of a trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrialRunner:
    """Runs the trials of a study with one worker per device."""

    prepared: PreparedSearch
    devices: list[str]
    on_trial: Callable[[FinishedTrial], None]
    stop: threading.Event
    deadline: float | None = field(default=None)

    def should_stop(self) -> bool:
        return self.stop.is_set() or (self.deadline is not None and time.monotonic() > self.deadline)

    def run(self, study: SearchStudy, settings: SeededSettings, *, max_trials: int, part: TrialKind = "trial") -> None:
        """Run trials until `max_trials` have ended or the search is stopped."""
        workers = [
            WorkerConfig(
                target=_TRIAL_TARGET,
                goal=self.prepared.config.goal,
                machine=machine_name(),
                prepare=partial(_make_task, self.prepared, settings, part=part, device=device, jobs=len(self.devices)),
                should_stop=self.should_stop,
                on_finished=self.on_trial,
                part=part,
            )
            for device in self.devices
        ]
        run_together([partial(run_worker, study, worker, max_trials=max_trials) for worker in workers], stop=self.stop)


def _confirm_best(runner: _TrialRunner, study: SearchStudy, seed_study: SearchStudy, *, log: Log) -> None:
    """Retrain the best settings with other seeds, because one good result may be due to a lucky seed."""
    config = runner.prepared.config
    best = results.best_trials(study.trials(), is_higher_better=config.is_higher_better)
    if not best or runner.should_stop() or not config.seeds:
        return
    params = {trial.number: trial.params for trial in study.trials()}
    count = results.enqueue_seeds(seed_study, best, first_seed=config.seed, seeds=config.seeds)
    which, each = ("the best trial is", "") if len(best) == 1 else (f"the best {len(best)} trials are", " each")
    log(f"{which} retrained with {config.seeds} other seeds{each} ({count} runs)")

    def settings(claimed: ClaimedTrial) -> tuple[dict[str, Any], int]:
        chosen = claimed.trial.params
        return dict(params[chosen[results.TRIAL_KEY]]), chosen[results.SEED_KEY]

    # max_trials=0 runs only the trials that are already enqueued.
    runner.run(seed_study, settings, max_trials=0, part="seed")


def winning_args(name: str, *, recipe: str, root: Path = Path("runs")) -> tuple[str, ...]:
    """Return the arguments for the final training run: the options shared by all trials, and the best settings."""
    from whet.run.search_result import is_search, read_search

    # Skip a folder of this name that holds no search, such as a data folder.
    folder = Path(name) if is_search(Path(name)) else root / name
    result = read_search(folder)
    own = load_recipe(recipe).name
    if result.recipe != own:
        raise UsageError(
            "the search was started with a different recipe", got=f"{result.recipe}, not {own}", try_="the same recipe"
        )
    if result.winner is None:
        raise UsageError("the search has no winner", got=f"{len(result.trials)} trials", try_="more --trials")
    return tuple(as_argument(key, value) for key, value in {**result.fixed, **result.winner.settings}.items())


def _make_task(
    prepared: PreparedSearch,
    settings: SeededSettings,
    claimed: ClaimedTrial,
    *,
    part: TrialKind,
    device: str,
    jobs: int,
) -> TrialTask:
    config = prepared.config
    values, seed = settings(claimed)
    fixed = {**config.fixed, "seed": seed}
    # Limit the threads: concurrent trials on one CPU would otherwise start one thread per core each.
    if jobs > 1 and device in ("auto", "cpu") and "threads" not in fixed:
        fixed["threads"] = max(1, (psutil.cpu_count(logical=False) or 1) // jobs)
    args = [as_argument(key, value) for key, value in {**fixed, **values}.items()]
    # Resolve the config here, so that an invalid combination of settings fails in the parent process.
    resolve_config(load_recipe(prepared.recipe).Config, args)
    run = prepared.folder / f"{part}-{claimed.number:04d}"
    # A run that was started on another machine does not exist here, so its trial starts over.
    if claimed.run is not None and Path(claimed.run).parent == prepared.folder:
        run = Path(claimed.run)
    arguments = {
        "recipe": prepared.recipe,
        "args": args,
        "goal": config.goal,
        "split_seed": config.seed,
        "subset": config.subset,
        "evaluations": config.evaluations,
        "run": str(run),
        "device": device,
        # Skip autotuning: steps cannot be timed while other trials run.
        "measures": jobs == 1,
    }
    return TrialTask(arguments=arguments, run=run)


def _open_study(storage: "BaseStorage", config: SearchConfig) -> SearchStudy:
    space: SearchSpace = config.space
    return SearchStudy(
        storage,
        config.name,
        is_higher_better=config.is_higher_better,
        distributions=samplers.space_distributions(space),
        sampler=lambda number: samplers.make_sampler(config.sampler, space, seed=config.seed, number=number),
        pruner=samplers.make_pruner(config.pruner),
    )


def _open_seed_study(storage: "BaseStorage", config: SearchConfig) -> SearchStudy:
    import optuna

    return SearchStudy(
        storage,
        f"{config.name} seeds",
        is_higher_better=config.is_higher_better,
        distributions=results.seed_distributions(),
        sampler=lambda number: optuna.samplers.RandomSampler(seed=number),
        pruner=optuna.pruners.NopPruner(),
    )


def _check_study(storage: "BaseStorage", config: SearchConfig) -> None:
    """Check the configuration against the one in the study, or store it if the study has none."""
    number = storage.get_study_id_from_name(config.name)
    stored = storage.get_study_user_attrs(number).get(_STUDY_ATTRIBUTE)
    if stored is None:
        storage.set_study_user_attr(number, _STUDY_ATTRIBUTE, config.as_json())
    else:
        check_same_search(SearchConfig.from_json(stored, where=config.name), config, where=config.name)


def _check_storage(storage: "BaseStorage", config: SearchConfig, *, url: str | None) -> None:
    """Raise UsageError if this storage does not contain the trials of the search, which would otherwise start over."""
    if config.name not in {study.study_name for study in storage.get_all_studies()}:
        raise UsageError(
            "the trials of this search are not in that storage",
            got=without_password(url),
            try_="the --storage that it was started with, or another --name",
        )


def _earlier_seconds(folder: Path) -> float:
    """Return the seconds that earlier sessions of the search took."""
    from whet.run.search_result import is_search, read_search

    with contextlib.suppress(UsageError):
        return read_search(folder).seconds if is_search(folder) else 0.0
    return 0.0


@contextlib.contextmanager
def _remove_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder on exit if nothing was written to it."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _absolute_recipe(what: str) -> str:
    """Make the path of a recipe file absolute, because a trial may run in another working directory."""
    place, colon, factory = what.partition(":")
    return what if what in BUILT_IN or not place.endswith(".py") else f"{Path(place).absolute()}{colon}{factory}"


def _check_limits(*, trials: int, jobs: int, timeout: float | None) -> None:
    for name, number in (("trials", trials), ("jobs", jobs)):
        if number < 1:
            raise UsageError(f"{name} must be at least 1", got=str(number), try_=f"--{name} 1")
    if timeout is not None and not timeout > 0:
        raise UsageError("a timeout is a number of seconds above 0", got=str(timeout), try_="--timeout 600")


def _check_name(name: str | None) -> None:
    is_plain = name is None or (name.isprintable() and "/" not in name and len(name.encode()) <= _MAX_NAME_BYTES)
    if not is_plain or name == "" or (name or "").startswith("."):
        raise UsageError("invalid search name", got=repr(name), try_="--name reviews-lr")
