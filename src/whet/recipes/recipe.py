"""What a recipe is, and how one is found: by name, or in a Python file of yours."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from whet.base.errors import UsageError, WhetError, nearest
from whet.config.keys import CommonConfig
from whet.plan.workload import Workload

BUILT_IN = {"text": "whet.recipes.text.recipe"}


@runtime_checkable
class Recipe(Protocol):
    """A complete workload; what a plan needs to know of it."""

    name: str
    Config: type[Any]

    def describe(self, config: Any) -> Workload:
        """What is to be trained, without torch."""
        ...


def load_recipe(word: str) -> Recipe:
    """The recipe behind a word: a built-in name, `path.py`, `path.py:factory` or `module:factory`."""
    if word in BUILT_IN:
        return _made_by(importlib.import_module(BUILT_IN[word]).recipe, word)
    place, _, factory = word.partition(":")
    if place.endswith(".py"):
        module = _import_file(Path(place))
    elif factory:
        module = _import_module(place)
    else:
        meant = nearest(word, BUILT_IN)
        hint = (
            f"did you mean {meant!r}?" if meant else "a recipe (" + ", ".join(BUILT_IN) + "), a file.py or a run folder"
        )
        raise UsageError("no such recipe", got=word, try_=hint)
    made_by = getattr(module, factory or "recipe", None)
    if not callable(made_by):
        raise UsageError(
            f"{place} does not define {factory or 'recipe'}()", got=word, try_="def recipe(): return MyRecipe()"
        )
    return _made_by(made_by, word)


def _made_by(factory: Callable[[], object], word: str) -> Recipe:
    made = factory()
    if not isinstance(made, Recipe):
        missing = [name for name in ("name", "Config", "describe") if not hasattr(made, name)]
        raise UsageError(
            f"what {word} gives is not a recipe", got=f"no {', '.join(missing)}", try_="see whet.recipes.text"
        )
    if not (isinstance(made.Config, type) and issubclass(made.Config, CommonConfig)):
        raise UsageError(
            f"the Config of {word} lacks the common keys",
            got=repr(made.Config),
            try_="class Config(whet.config.keys.CommonConfig)",
        )
    return made


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError("no such recipe file", got=str(path), try_="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
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
    except Exception as error:
        raise WhetError(
            f"{where} could not be loaded", got=f"{type(error).__name__}: {error}", try_="--debug shows where"
        ) from error
