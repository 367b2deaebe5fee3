"""What a recipe is, and how one is found: by name, or in a Python file of yours."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from whet.base.errors import UsageError, WhetError, nearest
from whet.config.keys import CommonConfig
from whet.plan.workload import Workload

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
    def dev(self) -> Any: ...
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
    """A model that extends `whet.config.keys.CommonConfig`."""
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

    def evaluate(self, model: Any, micros: Any) -> dict[str, Any]:
        """Metrics over micro-batches of a split, and perhaps a confusion matrix and samples (engine/findings.py)."""

    def keep(self, config: Any, data: Any) -> dict[str, Any]:
        """What using the model later needs besides its weights, as plain JSON; kept in the run folder."""


PARTS = ("name", "Config", "goal", "describe", "data", "model", "loss", "evaluate", "keep")


def load_recipe(word: str) -> Recipe:
    """The recipe behind a word: a built-in name, `path.py`, `path.py:factory` or `module:factory`."""
    return as_recipe(load_factory(word)(), word)


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
        meant = nearest(word, BUILT_IN)
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


def as_recipe(made: object, word: str) -> Recipe:
    """What a factory gave, if it is a recipe."""
    missing = [name for name in PARTS if getattr(made, name, None) is None]
    if missing:
        raise UsageError(
            f"what {word} gives is not a recipe", got=f"no {', '.join(missing)}", try_="whet init FILE writes one"
        )
    config = made.Config  # type: ignore[attr-defined]
    if not (isinstance(config, type) and issubclass(config, CommonConfig)):
        raise UsageError(
            f"the Config of {word} lacks the common keys",
            got=repr(config),
            try_="class Config(whet.config.keys.CommonConfig)",
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
    _run(lambda: loader.exec_module(module), str(path))
    return module


def _import_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _run(lambda: importlib.import_module(name), name)
    finally:
        sys.path.pop(0)


def _run(load: Callable[[], Any], where: str) -> Any:
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
