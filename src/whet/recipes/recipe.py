"""The base class of recipes, and how a recipe is loaded: by name or from a Python file."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from whet.base.errors import UsageError, WhetError, closest_match
from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.run.folder import installed_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInspection:
    """A data report, ready to be shown."""

    lines: tuple[str, ...]
    as_json: dict[str, Any]
    num_findings: int


class InspectsData(Protocol):
    """A recipe that can look at data before it trains on it."""

    def inspect_data(self, config: Any, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> DataInspection:
        """What `path` holds and what is wrong with it; a cleaned copy at `fix`, with the kinds in `leave` left in."""


BUILT_IN = {
    "text": "whet.recipes.text.recipe",
    "chat": "whet.recipes.chat.recipe",
    "puzzle": "whet.recipes.puzzle.recipe",
    "hex": "whet.recipes.hex.recipe",
}


class Splits(Protocol):
    """A recipe's data: three parts, each made of tensors, a map-style dataset, or an iterable."""

    @property
    def train(self) -> Any: ...
    @property
    def val(self) -> Any: ...
    @property
    def test(self) -> Any: ...


class Recipe(Protocol):
    """A complete workload. `describe` needs no torch, so that a plan can be made anywhere.

    The recipe of a causal model has a method outputs(model, micro) too, which gives (batch, length, ...): before the
    first step it is tried whether each place depends on itself and earlier ones only. A recipe whose parameters do not
    all learn alike has a method optimizer(config), which gives an OptimizerChoice. One that several processes cannot
    train together says why in an attribute only_one_process. Several processes share an evaluation where there are
    methods tally(model, micros), what is known of these samples as plain JSON, and conclude(model, tallies), the
    metrics of all; else the first one evaluates everything while the others wait. One that knows why its data may be
    other than when a run was started says so in explain_other_data(error, config, versions), which gives a WhetError.
    """

    name: str
    Config: type[Any]
    """A model that extends `whet.config.options.CommonConfig`."""
    goal: str
    """The metric that counts; higher is better, unless an attribute `lower_is_better` lists its name.

    A key `goal` in the Config lets the user choose another one.
    """

    def describe(self, config: Any, data: Any = None) -> Workload:
        """What is to be trained; more is known once the data was read."""

    def data(self, config: Any) -> Splits:
        """Reads the data."""

    def model(self, config: Any, data: Any) -> Any:
        """The model with its first weights, drawn from torch's generator."""

    def loss(self, model: Any, micro: Any) -> Any:
        """The mean over the samples of a micro-batch, or a pair (sum, weight)."""

    def evaluate(self, model: Any, micro_batches: Any) -> dict[str, Any]:
        """Metrics over micro-batches of a split, and perhaps a confusion matrix and samples (training/metrics.py)."""

    def keep(self, config: Any, data: Any) -> dict[str, Any]:
        """What using the model later needs besides its weights, as plain JSON; kept in the run folder."""


REQUIRED_ATTRIBUTES = ("name", "Config", "goal", "describe", "data", "model", "loss", "evaluate", "keep")


def load_recipe(word: str) -> Recipe:
    """The recipe behind a word: a built-in name, `path.py`, `path.py:factory` or `module:factory`."""
    return validate_recipe(load_factory(word)(), word)


def load_factory(word: str, *, default: tuple[str, ...] = ("recipe",)) -> Callable[[], Any]:
    """What a word names: a recipe's own factory, the one that is named, or the first of `default` that is there."""
    if word in BUILT_IN:
        return cast("Callable[[], Any]", importlib.import_module(BUILT_IN[word]).recipe)
    place, _, factory = word.partition(":")
    if place.endswith(".py"):
        module = _import_file(Path(place))
    elif factory:
        module = _import_module(place)
    else:
        meant = closest_match(word, BUILT_IN)
        hint = f"did you mean {meant!r}?" if meant else "a recipe (" + ", ".join(BUILT_IN) + ") or a file.py"
        raise UsageError("no such recipe", got=word, try_=hint)
    names = (factory,) if factory else default
    found = next((made for name in names if callable(made := getattr(module, name, None))), None)
    if found is None:
        raise UsageError(
            f"{place} does not define {' or '.join(names)}()", got=word, try_=f"def {names[0]}(): return ..."
        )
    return cast("Callable[[], Any]", found)


def is_recipe(made: object) -> bool:
    """Whether this is meant as a recipe, complete or not."""
    return hasattr(made, "Config")


def validate_recipe(made: object, word: str) -> Recipe:
    """What a factory gave, if it is a recipe."""
    missing = [name for name in REQUIRED_ATTRIBUTES if getattr(made, name, None) is None]
    if missing:
        raise UsageError(
            f"what {word} gives is not a recipe", got=f"no {', '.join(missing)}", try_="whet init FILE writes one"
        )
    config = made.Config  # type: ignore[attr-defined]
    if not (isinstance(config, type) and issubclass(config, CommonConfig)):
        raise UsageError(
            f"the Config of {word} lacks the common keys",
            got=repr(config),
            try_="class Config(whet.config.options.CommonConfig)",
        )
    return cast(Recipe, made)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError("no such recipe file", got=str(path), try_="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    # What lies beside the file may be imported, as for any script; last, so that it hides nothing.
    if str(path.parent.absolute()) not in sys.path:
        sys.path.append(str(path.parent.absolute()))
    loader = spec.loader
    _import_checked(lambda: loader.exec_module(module), str(path))
    return module


def _import_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _import_checked(lambda: importlib.import_module(name), name)
    finally:
        sys.path.pop(0)


def _import_checked(load: Callable[[], Any], where: str) -> Any:
    try:
        return load()
    except WhetError:
        raise
    except SystemExit as error:
        # Silence and exit code 0 would look like a finished training.
        raise WhetError(
            f"{where} ends the program", got=f"sys.exit({error.code!r})", try_="a file without it"
        ) from error
    except Exception as error:
        raise WhetError(
            f"{where} could not be loaded", got=f"{type(error).__name__}: {error}", try_="--debug shows where"
        ) from error


class EmbeddedData(NamedTuple):
    """What data is made from, in words of its recipe."""

    is_made: str
    """ "the embedded talks are made from whet itself and from Python's library" """
    sources: Mapping[str, str]
    """What a run records the versions of, by how it is called there."""
    otherwise: str
    """What must have changed where all of those versions are the same."""
    instead: str
    """What does not change by itself."""


def explain_data_change(error: UsageError, made: EmbeddedData, then: Mapping[str, str | None]) -> UsageError:
    """The refusal of other data with its reason; `then` are the versions that the run was started with."""
    now = installed_versions()
    changes = [
        f"{name} has changed since ({then.get(key)} -> {now[key]})"
        for key, name in made.sources.items()
        if then.get(key) != now[key]
    ]
    before = ", ".join(f"{name} {then.get(key)}" for key, name in made.sources.items())
    return UsageError(
        error.what,
        got=f"{error.got}; {made.is_made}, and {' and '.join(changes) or made.otherwise}",
        try_=f"--fresh or another --run to start anew; to go on, what it was started with ({before}); "
        f"{made.instead} stay as they are",
    )
