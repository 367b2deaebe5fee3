"""`whet.search`: hyperparameter search over a recipe's options; every trial is a run."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from whet.base.errors import UsageError
from whet.config.options import MAX_SEEDS
from whet.config.resolve import resolve_config
from whet.config.sources import flatten, parse_args, read_config_file
from whet.hpo import results, samplers
from whet.hpo.results import collect_results
from whet.hpo.search_config import SearchConfig, check_same_search, read_search_config, write_search_config
from whet.hpo.space import SearchSpace, as_argument, read_space
from whet.hpo.storage import check_address, is_sqlite, open_storage, without_password
from whet.hpo.study import ClaimedTrial, SearchStudy
from whet.hpo.worker import (
    FinishedTrial,
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
_MAX_NAME_BYTES = 200
"""Bytes; file systems take 255."""
_STUDY_ATTRIBUTE = "whet"
"""The study's own copy of the question, for machines that share nothing else."""
LogLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSearch:
    """A search that is ready to be worked on: checked, and nothing written yet."""

    word: str
    """The recipe as a trial's process finds it."""
    question: SearchConfig
    folder: Path
    device: str = "auto"

    def most(self, trials: int) -> int:
        """How many trials there will be, of so many that may be: a grid has an end."""
        points = samplers.num_points(self.question.sampler, self.question.space)
        return trials if points is None else min(trials, points)


def prepare_search(
    what: str,
    words: Iterable[str],
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
    """Reads and checks what is to be searched."""
    recipe = load_recipe(what)
    from_file = flatten(read_config_file(file)) if file else {}
    space, fixed = read_space(recipe.Config, words, file=from_file)
    resolved = resolve_config(recipe.Config, fixed)
    recipe.describe(resolved.config)
    if not 0 < subset <= 1:
        raise UsageError("a subset is a share of the training part", got=str(subset), try_="--subset 0.2")
    if not 0 <= seeds <= MAX_SEEDS:
        raise UsageError(f"from 0 to {MAX_SEEDS:,} seeds can be tried", got=str(seeds), try_="--seeds 3")
    _check_name(name)
    if not re.fullmatch(r"auto|mps|cpu|fake|cuda(:[0-9]+)?", device):
        raise UsageError("no such device", got=device, try_="auto, mps, cuda, cuda:1 or cpu")
    folder = (root / name if name else next_run_path(root, recipe=f"{recipe.name}-search")).absolute()
    goal = recipe.selected_goal(resolved.config)
    if goal is None:
        raise UsageError("a search needs a metric to optimize", got=f"{what} has no goal", try_='goal = "accuracy"')
    question = SearchConfig(
        name=folder.name,
        recipe=recipe.name,
        goal=goal,
        is_higher_better=goal not in recipe.lower_is_better,
        resource=recipe.resource or ("epochs" if resolved.config.max_steps is None else "steps"),
        space=space,
        fixed=parse_args(fixed).values,
        subset=subset,
        seed=resolved.config.seed,
        seeds=seeds,
        sampler=sampler,
        pruner=pruner,
    )
    samplers.make_sampler(sampler, space, seed=0, number=0)
    samplers.make_pruner(pruner)
    return PreparedSearch(word=_absolute_recipe(what), question=question, folder=folder, device=device)


def search(
    what: str,
    words: Iterable[str] = (),
    *,
    trials: int = 20,
    timeout: float | None = None,
    storage: str | None = None,
    jobs: int = 1,
    say: LogLine | None = None,
    told: Callable[[FinishedTrial], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> SearchResult:
    """Searches the settings of a recipe, and names a winner; the same call with the same name goes on.

    `what` is a recipe or a Python file; `words` are ranges and lists to search ("lr=1e-5..1e-3:log",
    "arch.layers=[1,2]") and settings that all trials share ("epochs=2"). `trials` is how many there are in all, by
    however many processes; `timeout` in seconds. `storage` is None for a journal file in the search's folder,
    "postgresql+psycopg://..." for many machines, or "sqlite:///FILE" for this process alone. Other options: name,
    root, file, subset, seeds, sampler, pruner, device (see `prepare_search`). The folder's result.json has the result.
    """
    asked = prepare_search(what, words, **options)
    return run_search(asked, trials=trials, timeout=timeout, storage=storage, jobs=jobs, say=say, told=told, stop=stop)


def run_search(
    asked: PreparedSearch,
    *,
    trials: int,
    timeout: float | None = None,
    storage: str | None = None,
    jobs: int = 1,
    say: LogLine | None = None,
    told: Callable[[FinishedTrial], None] | None = None,
    stop: threading.Event | None = None,
) -> SearchResult:
    """Works on a search until it is done, and writes its result."""
    began = time.monotonic()
    _check_limits(trials=trials, jobs=jobs, timeout=timeout)
    question, folder = asked.question, asked.folder
    say = say or (lambda _line: None)
    stop = stop or threading.Event()
    most = asked.most(trials)
    if most < trials:
        say(f"--trials {trials}: the grid has {most} points, and none is tried twice")
    kept = read_search_config(folder)
    if kept is not None:
        check_same_search(kept, question, where=str(folder))
    if jobs > 1 and is_sqlite(storage):
        raise UsageError(
            "SQLite is for one process at a time", got=f"--jobs {jobs}", try_="no --storage: the journal file"
        )
    check_address(storage)
    if (folder / RUN_FILE).exists():
        raise UsageError("a run is there, and no search", got=str(folder), try_="another --name")
    devices = devices_for(asked.device, jobs=jobs, log=say)
    durable.make_directory(folder)
    before = _earlier_seconds(folder)
    with _remove_if_empty(folder), open_storage(storage, folder=folder) as opened:
        if kept is not None:
            _check_storage(opened, question, url=storage)
        ledger = _open_ledger(opened, question)
        _check_study(opened, question)
        if kept is None:
            write_search_config(folder, question)
        confirming = _open_seed_ledger(opened, question)
        deadline = None if timeout is None else began + timeout

        def should_stop() -> bool:
            return stop.is_set() or (deadline is not None and time.monotonic() > deadline)

        def do(
            where: SearchStudy,
            *,
            most: int,
            settings: Callable[[ClaimedTrial], tuple[dict[str, Any], int]],
            part: TrialKind,
        ) -> None:
            made = [
                WorkerConfig(
                    target=_TRIAL_TARGET,
                    goal=question.goal,
                    machine=machine_name(),
                    prepare=partial(_make_task, asked, settings, part=part, device=device, jobs=len(devices)),
                    should_stop=should_stop,
                    on_finished=told or (lambda _ended: None),
                    part=part,
                )
                for device in devices
            ]
            run_together([partial(run_worker, where, each, max_trials=most) for each in made], stop=stop)

        do(ledger, most=most, settings=lambda taken: (dict(taken.trial.params), question.seed), part="trial")
        best = results.best_trials(ledger.trials(), is_higher_better=question.is_higher_better)
        if best and not should_stop() and question.seeds:
            settings = {trial.number: trial.params for trial in ledger.trials()}
            count = results.enqueue_seeds(confirming, best, first_seed=question.seed, seeds=question.seeds)
            which, each = ("the best one is", "") if len(best) == 1 else (f"the best {len(best)} are", " each")
            say(f"{which} trained with {question.seeds} other seeds{each} ({count} runs)")
            chosen = partial(_params_with_seed, settings)
            do(confirming, most=0, settings=chosen, part="seed")
        result = collect_results(
            question, ledger, confirming, storage=without_password(storage), seconds=before + time.monotonic() - began
        )
    write_search(folder, result)
    return result


def winning_args(name: str, *, recipe: str, root: Path = Path("runs")) -> tuple[str, ...]:
    """The words of the final training: what the trials shared, and the winner's settings."""
    from whet.run.search_result import is_search, read_search

    # A folder of that name that holds no search (data, mostly) is not meant.
    folder = Path(name) if is_search(Path(name)) else root / name
    found = read_search(folder)
    own = load_recipe(recipe).name
    if found.recipe != own:
        raise UsageError("the search is of another recipe", got=f"{found.recipe}, not {own}", try_="the same recipe")
    if found.winner is None:
        raise UsageError("the search has no winner", got=f"{len(found.trials)} trials", try_="more --trials")
    return tuple(as_argument(key, value) for key, value in {**found.fixed, **found.winner.settings}.items())


def _make_task(
    asked: PreparedSearch,
    settings: Callable[[ClaimedTrial], tuple[dict[str, Any], int]],
    taken: ClaimedTrial,
    *,
    part: TrialKind,
    device: str,
    jobs: int,
) -> TrialTask:
    question = asked.question
    values, seed = settings(taken)
    fixed = {**question.fixed, "seed": seed}
    if jobs > 1 and device in ("auto", "cpu") and "threads" not in fixed:
        fixed["threads"] = max(1, (psutil.cpu_count(logical=False) or 1) // jobs)
    words = [as_argument(key, value) for key, value in {**fixed, **values}.items()]
    resolve_config(load_recipe(asked.word).Config, words)
    own = asked.folder / f"{part}-{taken.number:04d}"
    # A run that began on another machine cannot be seen here: its trial begins anew.
    run = Path(taken.run) if taken.run is not None and Path(taken.run).parent == asked.folder else own
    arguments = {
        "recipe": asked.word,
        "words": words,
        "goal": question.goal,
        "split_seed": question.seed,
        "subset": question.subset,
        "evaluations": question.evaluations,
        "run": str(run),
        "device": device,
        # Beside other trials nothing can be measured.
        "measures": jobs == 1,
    }
    return TrialTask(arguments=arguments, run=run)


def _params_with_seed(settings: dict[int, dict[str, Any]], taken: ClaimedTrial) -> tuple[dict[str, Any], int]:
    chosen = taken.trial.params
    return dict(settings[chosen[results.TRIAL_KEY]]), chosen[results.SEED_KEY]


def _open_ledger(storage: "BaseStorage", question: SearchConfig) -> SearchStudy:
    space: SearchSpace = question.space
    return SearchStudy(
        storage,
        question.name,
        is_higher_better=question.is_higher_better,
        distributions=samplers.space_distributions(space),
        sampler=lambda number: samplers.make_sampler(question.sampler, space, seed=question.seed, number=number),
        pruner=samplers.make_pruner(question.pruner),
    )


def _open_seed_ledger(storage: "BaseStorage", question: SearchConfig) -> SearchStudy:
    import optuna

    return SearchStudy(
        storage,
        f"{question.name} seeds",
        is_higher_better=question.is_higher_better,
        distributions=results.seed_distributions(),
        sampler=lambda number: optuna.samplers.RandomSampler(seed=number),
        pruner=optuna.pruners.NopPruner(),
    )


def _check_study(storage: "BaseStorage", question: SearchConfig) -> None:
    number = storage.get_study_id_from_name(question.name)
    said = storage.get_study_user_attrs(number).get(_STUDY_ATTRIBUTE)
    if said is None:
        storage.set_study_user_attr(number, _STUDY_ATTRIBUTE, question.as_json())
    else:
        check_same_search(SearchConfig.from_json(said, where=question.name), question, where=question.name)


def _check_storage(storage: "BaseStorage", question: SearchConfig, *, url: str | None) -> None:
    """A search whose trials are kept elsewhere would begin anew in the folders of those trials."""
    if question.name not in {study.study_name for study in storage.get_all_studies()}:
        raise UsageError(
            "the trials of this search are not kept there",
            got=without_password(url),
            try_="the --storage that it began with, or another --name",
        )


def _earlier_seconds(folder: Path) -> float:
    """What a search that goes on has taken so far."""
    from whet.run.search_result import is_search, read_search

    with contextlib.suppress(UsageError):
        return read_search(folder).seconds if is_search(folder) else 0.0
    return 0.0


@contextlib.contextmanager
def _remove_if_empty(folder: Path) -> Iterator[None]:
    """Where nothing was written, nothing is left."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _absolute_recipe(what: str) -> str:
    """A file's name from anywhere: a trial's process may be elsewhere."""
    place, colon, factory = what.partition(":")
    return what if what in BUILT_IN or not place.endswith(".py") else f"{Path(place).absolute()}{colon}{factory}"


def _check_limits(*, trials: int, jobs: int, timeout: float | None) -> None:
    for name, number in (("trials", trials), ("jobs", jobs)):
        if number < 1:
            raise UsageError(f"{name} are counted from 1", got=str(number), try_=f"--{name} 1")
    if timeout is not None and not timeout > 0:
        raise UsageError("a timeout is a number of seconds", got=str(timeout), try_="--timeout 600")


def _check_name(name: str | None) -> None:
    is_plain = name is None or (name.isprintable() and "/" not in name and len(name.encode()) <= _MAX_NAME_BYTES)
    if not is_plain or name == "" or (name or "").startswith("."):
        raise UsageError("a search has a plain name", got=repr(name), try_="--name reviews-lr")
