"""How are a recipe's settings searched? Every trial is a run of it, on the same split, with the public training."""

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
from whet.config.files import read_config_file
from whet.config.keys import MOST_SEEDS
from whet.config.resolve import resolve
from whet.config.words import flatten, read_words
from whet.recipes.recipe import BUILT_IN, load_recipe
from whet.run import durable
from whet.run.folder import RUN_FILE, next_run_path
from whet.run.search_result import SearchResult, write_search
from whet.trials import sampling, seeds
from whet.trials.ledger import Ledger, Taken
from whet.trials.outcome import outcome
from whet.trials.question import Question, agree, read_question, write_question
from whet.trials.side_by_side import devices_for, machine_name, together
from whet.trials.space import Space, as_word, read_space
from whet.trials.storage import check_address, is_sqlite, open_storage, without_password
from whet.trials.worker import Ended, Part, Task, Work, work

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

TARGET = "whet.recipes.trial:train_trial"
_MOST_NAME = 200
"""Bytes; file systems take 255."""
_ATTRIBUTE = "whet"
"""The study's own copy of the question, for machines that share nothing else."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search that is ready to be worked on: checked, and nothing written yet."""

    word: str
    """The recipe as a trial's process finds it."""
    question: Question
    folder: Path
    device: str = "auto"

    def most(self, trials: int) -> int:
        """How many trials there will be, of so many that may be: a grid has an end."""
        points = sampling.num_points(self.question.sampler, self.question.space)
        return trials if points is None else min(trials, points)


def ask(
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
) -> Search:
    """Reads and checks what is to be searched."""
    recipe = load_recipe(what)
    from_file = flatten(read_config_file(file)) if file else {}
    space, fixed = read_space(recipe.Config, words, file=from_file)
    resolved = resolve(recipe.Config, fixed)
    recipe.describe(resolved.config)
    if not 0 < subset <= 1:
        raise UsageError("a subset is a share of the training part", got=str(subset), try_="--subset 0.2")
    if not 0 <= seeds <= MOST_SEEDS:
        raise UsageError(f"from 0 to {MOST_SEEDS:,} seeds can be tried", got=str(seeds), try_="--seeds 3")
    _refuse_strange_name(name)
    if not re.fullmatch(r"auto|mps|cpu|fake|cuda(:[0-9]+)?", device):
        raise UsageError("no such device", got=device, try_="auto, mps, cuda, cuda:1 or cpu")
    folder = (root / name if name else next_run_path(root, recipe=f"{recipe.name}-search")).absolute()
    goal = getattr(resolved.config, "goal", recipe.goal)
    question = Question(
        name=folder.name,
        recipe=recipe.name,
        goal=goal,
        is_higher_better=goal not in getattr(recipe, "lower_is_better", ()),
        resource=getattr(recipe, "resource", "epochs" if resolved.config.max_steps is None else "steps"),
        space=space,
        fixed=read_words(fixed).values,
        subset=subset,
        seed=resolved.config.seed,
        seeds=seeds,
        sampler=sampler,
        pruner=pruner,
    )
    sampling.make_sampler(sampler, space, seed=0, number=0)
    sampling.make_pruner(pruner)
    return Search(word=_findable(what), question=question, folder=folder, device=device)


def search(
    what: str,
    words: Iterable[str] = (),
    *,
    trials: int = 20,
    timeout: float | None = None,
    storage: str | None = None,
    jobs: int = 1,
    say: Say | None = None,
    told: Callable[[Ended], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> SearchResult:
    """Searches the settings of a recipe, and names a winner; the same call with the same name goes on.

    `what` is a recipe or a Python file; `words` are ranges and lists to search ("lr=1e-5..1e-3:log",
    "arch.layers=[1,2]") and settings that all trials share ("epochs=2"). `trials` is how many there are in all, by
    however many processes; `timeout` in seconds. `storage` is None for a journal file in the search's folder,
    "postgresql+psycopg://..." for many machines, or "sqlite:///FILE" for this process alone. Other options: name,
    root, file, subset, seeds, sampler, pruner, device (see `ask`). The result is also in result.json of the folder.
    """
    asked = ask(what, words, **options)
    return carry_out(asked, trials=trials, timeout=timeout, storage=storage, jobs=jobs, say=say, told=told, stop=stop)


def carry_out(
    asked: Search,
    *,
    trials: int,
    timeout: float | None = None,
    storage: str | None = None,
    jobs: int = 1,
    say: Say | None = None,
    told: Callable[[Ended], None] | None = None,
    stop: threading.Event | None = None,
) -> SearchResult:
    """Works on a search until it is done, and writes its result."""
    began = time.monotonic()
    _refuse_impossible(trials=trials, jobs=jobs, timeout=timeout)
    question, folder = asked.question, asked.folder
    say = say or (lambda _line: None)
    stop = stop or threading.Event()
    most = asked.most(trials)
    if most < trials:
        say(f"--trials {trials}: the grid has {most} points, and none is tried twice")
    kept = read_question(folder)
    if kept is not None:
        agree(kept, question, where=str(folder))
    if jobs > 1 and is_sqlite(storage):
        raise UsageError(
            "SQLite is for one process at a time", got=f"--jobs {jobs}", try_="no --storage: the journal file"
        )
    check_address(storage)
    if (folder / RUN_FILE).exists():
        raise UsageError("a run is there, and no search", got=str(folder), try_="another --name")
    devices = devices_for(asked.device, jobs=jobs, say=say)
    durable.make_directory(folder)
    before = _seconds_before(folder)
    with _gone_if_empty(folder), open_storage(storage, folder=folder) as opened:
        if kept is not None:
            _refuse_other_storage(opened, question, url=storage)
        ledger = _ledger(opened, question)
        _agree_with_study(opened, question)
        if kept is None:
            write_question(folder, question)
        confirming = _confirming(opened, question)
        deadline = None if timeout is None else began + timeout

        def should_stop() -> bool:
            return stop.is_set() or (deadline is not None and time.monotonic() > deadline)

        def do(
            where: Ledger, *, most: int, settings: Callable[[Taken], tuple[dict[str, Any], int]], part: Part
        ) -> None:
            made = [
                Work(
                    target=TARGET,
                    goal=question.goal,
                    machine=machine_name(),
                    prepare=partial(_task, asked, settings, part=part, device=device, jobs=len(devices)),
                    should_stop=should_stop,
                    told=told or (lambda _ended: None),
                    part=part,
                )
                for device in devices
            ]
            together([partial(work, where, each, most=most) for each in made], stop=stop)

        do(ledger, most=most, settings=lambda taken: (dict(taken.trial.params), question.seed), part="trial")
        best = seeds.best_trials(ledger.trials(), is_higher_better=question.is_higher_better)
        if best and not should_stop() and question.seeds:
            settings = {trial.number: trial.params for trial in ledger.trials()}
            count = seeds.put_in_line(confirming, best, first_seed=question.seed, seeds=question.seeds)
            which, each = ("the best one is", "") if len(best) == 1 else (f"the best {len(best)} are", " each")
            say(f"{which} trained with {question.seeds} other seeds{each} ({count} runs)")
            chosen = partial(_with_seed, settings)
            do(confirming, most=0, settings=chosen, part="seed")
        result = outcome(
            question, ledger, confirming, storage=without_password(storage), seconds=before + time.monotonic() - began
        )
    write_search(folder, result)
    return result


def final_words(name: str, *, recipe: str, root: Path = Path("runs")) -> tuple[str, ...]:
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
    return tuple(as_word(key, value) for key, value in {**found.fixed, **found.winner.settings}.items())


def _task(
    asked: Search,
    settings: Callable[[Taken], tuple[dict[str, Any], int]],
    taken: Taken,
    *,
    part: Part,
    device: str,
    jobs: int,
) -> Task:
    question = asked.question
    values, seed = settings(taken)
    fixed = {**question.fixed, "seed": seed}
    if jobs > 1 and device in ("auto", "cpu") and "threads" not in fixed:
        fixed["threads"] = max(1, (psutil.cpu_count(logical=False) or 1) // jobs)
    words = [as_word(key, value) for key, value in {**fixed, **values}.items()]
    resolve(load_recipe(asked.word).Config, words)
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
    return Task(arguments=arguments, run=run)


def _with_seed(settings: dict[int, dict[str, Any]], taken: Taken) -> tuple[dict[str, Any], int]:
    chosen = taken.trial.params
    return dict(settings[chosen[seeds.TRIAL]]), chosen[seeds.SEED]


def _ledger(storage: "BaseStorage", question: Question) -> Ledger:
    space: Space = question.space
    return Ledger(
        storage,
        question.name,
        is_higher_better=question.is_higher_better,
        distributions=sampling.distributions(space),
        sampler=lambda number: sampling.make_sampler(question.sampler, space, seed=question.seed, number=number),
        pruner=sampling.make_pruner(question.pruner),
    )


def _confirming(storage: "BaseStorage", question: Question) -> Ledger:
    import optuna

    return Ledger(
        storage,
        f"{question.name} seeds",
        is_higher_better=question.is_higher_better,
        distributions=seeds.distributions(),
        sampler=lambda number: optuna.samplers.RandomSampler(seed=number),
        pruner=optuna.pruners.NopPruner(),
    )


def _agree_with_study(storage: "BaseStorage", question: Question) -> None:
    number = storage.get_study_id_from_name(question.name)
    said = storage.get_study_user_attrs(number).get(_ATTRIBUTE)
    if said is None:
        storage.set_study_user_attr(number, _ATTRIBUTE, question.as_json())
    else:
        agree(Question.from_json(said, where=question.name), question, where=question.name)


def _refuse_other_storage(storage: "BaseStorage", question: Question, *, url: str | None) -> None:
    """A search whose trials are kept elsewhere would begin anew in the folders of those trials."""
    if question.name not in {study.study_name for study in storage.get_all_studies()}:
        raise UsageError(
            "the trials of this search are not kept there",
            got=without_password(url),
            try_="the --storage that it began with, or another --name",
        )


def _seconds_before(folder: Path) -> float:
    """What a search that goes on has taken so far."""
    from whet.run.search_result import is_search, read_search

    with contextlib.suppress(UsageError):
        return read_search(folder).seconds if is_search(folder) else 0.0
    return 0.0


@contextlib.contextmanager
def _gone_if_empty(folder: Path) -> Iterator[None]:
    """Where nothing was written, nothing is left."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _findable(what: str) -> str:
    """A file's name from anywhere: a trial's process may be elsewhere."""
    place, colon, factory = what.partition(":")
    return what if what in BUILT_IN or not place.endswith(".py") else f"{Path(place).absolute()}{colon}{factory}"


def _refuse_impossible(*, trials: int, jobs: int, timeout: float | None) -> None:
    for name, number in (("trials", trials), ("jobs", jobs)):
        if number < 1:
            raise UsageError(f"{name} are counted from 1", got=str(number), try_=f"--{name} 1")
    if timeout is not None and not timeout > 0:
        raise UsageError("a timeout is a number of seconds", got=str(timeout), try_="--timeout 600")


def _refuse_strange_name(name: str | None) -> None:
    is_plain = name is None or (name.isprintable() and "/" not in name and len(name.encode()) <= _MOST_NAME)
    if not is_plain or name == "" or (name or "").startswith("."):
        raise UsageError("a search has a plain name", got=repr(name), try_="--name reviews-lr")
