"""The base class of recipes, and loading recipes by name or from a Python file.

This module does not import torch, so that `whet plan` works without it. Methods that need torch import it themselves.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from whet.base.errors import DataChangedError, UsageError, WhetError, closest_match
from whet.config.options import CommonConfig
from whet.plan.workload import Workload
from whet.run.folder import RUN_FILE, installed_versions, read_header, short_script
from whet.run.lock import OTHER_FOLDER
from whet.training.intercept import FirstStepReached, Interception, intercept

if TYPE_CHECKING:
    from whet.config.resolve import ResolvedConfig
    from whet.step.optimizers import OptimizerChoice

BUILT_IN = {
    "text": "whet.recipes.text.recipe",
    "chat": "whet.recipes.chat.recipe",
    "puzzle": "whet.recipes.puzzle.recipe",
    "hex": "whet.recipes.hex.recipe",
}


class Splits(Protocol):
    """The data of a recipe: three splits, each a dict of tensors, a map-style dataset or an iterable."""

    @property
    def train(self) -> Any: ...
    @property
    def val(self) -> Any: ...
    @property
    def test(self) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInspection:
    """The result of `whet data`: lines for a terminal, JSON for a program, and the number of problems."""

    lines: tuple[str, ...]
    as_json: dict[str, Any]
    num_findings: int


class Recipe:
    """A complete workload: options, data, model, loss and evaluation. Subclass it and override what differs.

    Required: `name`, `data`, `model` and `loss`. With `evaluate`, set `goal` to the metric that selects the best
    checkpoint. Each method in the section "Optional commands" enables a command (`whet predict`, `whet data`, ...).
    Without an override, the command raises a UsageError.

        class Mine(Recipe):
            name = "mine"

            def data(self, config): ...
            def model(self, config, data): ...
            def loss(self, model, micro): ...
    """

    name: str = ""
    Config: type[Any] = CommonConfig
    """The options: a subclass of `CommonConfig`."""
    goal: str | None = None
    """The metric that selects the best checkpoint. A key `goal` in the Config lets the user choose another one."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the goal is minimized ("min") or maximized ("max"). "auto" follows from its name (config/goal.py)."""
    resource: str | None = None
    """The unit of a search trial's budget, "epochs" or "steps"; None for steps if max_steps is set, else epochs."""
    single_process_reason: str | None = None
    """The reason why this recipe cannot be trained on several processes; None if it can."""

    # The methods that define training: data, model, loss and metrics.

    def data(self, config: Any) -> Splits:
        """Read the data and return its splits."""
        raise NotImplementedError

    def model(self, config: Any, data: Any) -> Any:
        """Return the model with its initial weights, drawn from torch's default generator."""
        raise NotImplementedError

    def loss(self, model: Any, micro: Any) -> Any:
        """Return the mean loss over the samples of a micro-batch, or a pair (sum, weight) with the mean as quotient."""
        raise NotImplementedError

    def optimizer(self, config: Any) -> "OptimizerChoice":
        """Return the optimizer; by default one group of parameters with the common options."""
        from whet.step.optimizers import OptimizerChoice

        return OptimizerChoice(name=config.optimizer, lr=config.lr, weight_decay=config.weight_decay)

    def evaluate(self, model: Any, micro_batches: Any) -> dict[str, Any]:
        """Return metrics over the micro-batches of a split, optionally with a confusion matrix and samples.

        The default calls `merge_metrics` with a single part from `partial_metrics`.
        """
        return self.merge_metrics(model, [self.partial_metrics(model, micro_batches)])

    def partial_metrics(self, model: Any, micro_batches: Any) -> Any:
        """Return JSON-serializable counts over this rank's share of a split. `merge_metrics` combines the parts.

        Without these two methods, rank 0 evaluates the whole split while all other ranks wait.
        """
        raise NotImplementedError

    def merge_metrics(self, model: Any, parts: list[Any]) -> dict[str, Any]:
        """Combine the parts of all ranks into the metrics of the whole split."""
        raise NotImplementedError

    def outputs(self, model: Any, micro: Any) -> Any:
        """Return the outputs of a causal model, (batch, length, ...).

        If overridden, a check before the first step verifies that no position depends on later positions.
        """
        raise NotImplementedError

    def metadata(self, config: Any, data: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return the plain JSON needed to use the model later, such as class names or a vocabulary."""
        return {}

    # The methods that provide facts for plans and resumed runs.

    def describe(self, config: Any, data: Any = None) -> Workload:
        """Describe the workload for a plan. Without `data`, sizes that depend on the data may be unknown or assumed.

        The default reads the data and builds the model to count its parameters. A recipe that overrides this method can
        be planned without torch and without data.
        """
        from whet.recipes.runner import describe_recipe

        return describe_recipe(self, config, data)

    def assumptions(self, config: Any) -> tuple[str, ...]:  # noqa: ARG002
        """Return the assumptions that `describe` makes without data, one line each."""
        return ()

    def check_installed(self, config: Any) -> None:
        """Raise an error if a package is missing that training with this config needs. It runs without torch."""

    def explain_changed_data(
        self,
        error: DataChangedError,
        config: Any,  # noqa: ARG002
        versions: Mapping[str, str | None],  # noqa: ARG002
    ) -> WhetError:
        """Return the error for a run whose data has changed, with the reason if it is known.

        `versions` contains the package versions at the start of the run.
        """
        return error

    # The methods that enable optional commands.

    def predict(self, config: Any, metadata: dict[str, Any]) -> tuple[Any, Any]:  # noqa: ARG002
        """Return (model, predict function) for `whet predict`. The caller then loads the weights into the model."""
        raise self._unsupported("predict", "predict")

    def example_input(self, metadata: dict[str, Any]) -> str | None:  # noqa: ARG002
        """Return an input to suggest for `whet predict` after training, or None for no suggestion."""
        return None

    def load_generator(self, metadata: dict[str, Any]) -> Any:  # noqa: ARG002
        """Return the text generator for `whet generate`, `whet chat` and `whet serve`."""
        raise self._unsupported("load_generator", "generate text")

    def inspect_data(self, config: Any, path: Path, *, fix: Path | None, leave: tuple[str, ...]) -> DataInspection:  # noqa: ARG002
        """Report the contents and defects of `path`. Write a cleaned copy to `fix`, except for kinds in `leave`."""
        raise self._unsupported("inspect_data", "inspect data")

    def write_model_files(self, model: Any, metadata: dict[str, Any], folder: Path, *, to: str) -> dict[str, Any]:  # noqa: ARG002
        """Write the model in the format `to` for `whet export`, and return the facts for the export manifest."""
        raise self._unsupported("write_model_files", "export its model")

    def play_match(self, one: str, two: str, **options: Any) -> Any:  # noqa: ARG002
        """Play a match between two players for `whet arena`."""
        raise self._unsupported("play_match", "be played")

    def train_by_self_play(self, resolved: "ResolvedConfig[Any]", **options: Any) -> int:  # noqa: ARG002
        """Train by self-play in generations, and return the exit code."""
        raise self._unsupported("train_by_self_play", "train by self-play")

    def selected_goal(self, config: Any) -> str | None:
        """Return the metric that selects the best checkpoint: `goal` of the config if set, else of the recipe."""
        chosen: str | None = getattr(config, "goal", self.goal)
        return chosen

    def supports(self, method: str) -> bool:
        """Return whether this recipe overrides `method`.

        >>> Recipe().supports("predict")
        False
        """
        # Compare the attributes, like Lightning's is_overridden: a default that raises is not support.
        return getattr(type(self), method) is not getattr(Recipe, method)

    def _unsupported(self, method: str, action: str) -> UsageError:
        """Return the error for an optional method that this recipe does not override."""
        able = [name for name in BUILT_IN if load_factory(name)().supports(method)]
        hint = able[0] if len(able) == 1 else f"one of {', '.join(able)}"
        return UsageError(f"the recipe {self.name} cannot {action}", got=self.name, try_=hint)


_REQUIRED_METHODS = ("data", "model", "loss")


def load_recipe(word: str) -> Recipe:
    """Load a recipe: a built-in name, `path.py`, `path.py:factory` or `module:factory`."""
    try:
        # A script that trains by itself must not start here, when it is imported or called.
        with intercept(Interception()), script_arguments(word):
            made = load_factory(word)()
    except FirstStepReached:
        raise UsageError(
            f"{word} is a script that trains, not a recipe",
            got="it calls whet.train or whet.Session",
            try_=f"python {word.partition(':')[0]}; whet plan, prove, bench, check and compare take {word}",
        ) from None
    return validate_recipe(made, word)


@contextlib.contextmanager
def script_arguments(word: str) -> Iterator[None]:
    """Set sys.argv as `python path.py` does, so that a script that parses its arguments does not see whet's."""
    before = sys.argv
    sys.argv = [word.partition(":")[0]]
    try:
        yield
    finally:
        sys.argv = before


def load_factory(word: str, *, default: tuple[str, ...] = ("recipe",)) -> Callable[[], Any]:
    """Return the factory that `word` refers to. If it names no function, return the first of `default` that exists."""
    if word in BUILT_IN:
        return cast("Callable[[], Any]", importlib.import_module(BUILT_IN[word]).recipe)
    place, _, factory = word.partition(":")
    if place.endswith(".py"):
        module = _import_file(Path(place))
    elif factory:
        module = _import_module(place)
    elif "=" in word:
        raise UsageError(
            "the recipe comes before its settings", got=word, try_=f"chat {word}; or text, puzzle, hex, a file.py"
        )
    else:
        if (Path(word) / RUN_FILE).is_file():
            raise _run_folder_error(word)
        if os.sep in word:
            what = "no run is in this folder" if Path(word).is_dir() else "no such folder or file"
            raise UsageError(what, got=word, try_="a run folder (whet runs lists them), a recipe or a file.py")
        meant = closest_match(word, BUILT_IN)
        hint = f"did you mean {meant!r}?" if meant else "a recipe (" + ", ".join(BUILT_IN) + ") or a file.py"
        raise UsageError("no such recipe", got=word, try_=hint)
    names = (factory,) if factory else default
    match = next((made for name in names if callable(made := getattr(module, name, None))), None)
    if match is None:
        hint = _missing_factory_hint(module, place, factory, default=default)
        raise UsageError(f"{place} does not define {' or '.join(names)}()", got=word, try_=hint)
    return cast("Callable[[], Any]", match)


def _missing_factory_hint(module: Any, place: str, factory: str, *, default: tuple[str, ...]) -> str:
    """Return what to type if a module does not define `factory`, or without one, none of the functions `default`."""
    values = vars(module).items()
    own = [name for name, value in values if callable(value) and getattr(value, "__module__", "") == module.__name__]
    if factory:
        meant = closest_match(factory, own)
        return f"{place}:{meant} (did you mean {meant}?)" if meant else f"def {factory}(): return ..."
    if default == ("recipe",) and place.endswith(".py"):
        # This command needs a recipe, but a script trains by itself.
        if "main" in own:
            return f"python {place}; whet plan, prove, bench, check and compare take {place}:main"
        if "__main__" in Path(place).read_text(encoding="utf-8", errors="replace"):
            return f"python {place}"
    return f"def {default[0]}(): return ..."


def _run_folder_error(word: str) -> UsageError:
    """Return the error for a run folder given instead of a recipe. It suggests the script or recipe of the run."""
    header = read_header(Path(word).absolute())
    if header.script is not None:
        script = short_script(header.script)
        file, _, function = script.partition(":")
        hint = script if function else f"{file}:main, after moving the training code into a function: def main(): ..."
    else:
        hint = header.recipe if header.command else "the file of its code: FILE.py:main"
    return UsageError("a run folder is not a recipe, and it holds no code", got=word, try_=f"{hint} instead of {word}")


def validate_recipe(made: object, word: str) -> Recipe:
    """Check that a factory returned a complete recipe."""
    if not isinstance(made, Recipe):
        raise UsageError(
            f"{word} does not return a recipe",
            got=type(made).__name__,
            try_="class Mine(whet.Recipe); whet init FILE writes an example",
        )
    missing = [name for name in _REQUIRED_METHODS if not made.supports(name)]
    missing = missing if made.name else ["name", *missing]
    if missing:
        raise UsageError(
            f"the recipe of {word} is incomplete", got=f"no {', '.join(missing)}", try_="whet init FILE writes one"
        )
    if not (isinstance(made.Config, type) and issubclass(made.Config, CommonConfig)):
        raise UsageError(
            f"the Config of {word} lacks the common keys",
            got=repr(made.Config),
            try_="class Config(whet.config.options.CommonConfig)",
        )
    return made


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError("no such recipe file", got=str(path), try_="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register the module, because pickle and dataclasses look up classes through sys.modules.
    sys.modules.setdefault(path.stem, module)
    _append_path(path.parent)
    loader = spec.loader
    _import_checked(lambda: loader.exec_module(module), str(path))
    return module


def _append_path(folder: Path) -> None:
    """Make the modules in a folder importable, as for any script. Appended last, they shadow no installed package."""
    if str(folder.absolute()) not in sys.path:
        sys.path.append(str(folder.absolute()))


def _import_module(name: str) -> Any:
    _append_path(Path.cwd())
    # Like `python -m`, look for the named module in the current folder first. Its own imports use the normal order.
    package = name.partition(".")[0]
    spec = PathFinder.find_spec(package, [str(Path.cwd())])
    loader = None if spec is None else spec.loader
    if spec is not None and loader is not None and package not in sys.modules:
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        try:
            _import_checked(lambda: loader.exec_module(module), name)
        except BaseException:
            del sys.modules[package]
            raise
    return _import_checked(lambda: importlib.import_module(name), name)


def _import_checked(load: Callable[[], Any], where: str) -> Any:
    try:
        return load()
    except WhetError:
        raise
    except SystemExit as error:
        # Turn SystemExit into an error: exit code 0 without output would look like a finished run.
        raise WhetError(
            f"{where} ends the program", got=f"sys.exit({error.code!r})", try_="a file without it"
        ) from error
    except Exception as error:
        raise WhetError(
            f"{where} could not be loaded", got=f"{type(error).__name__}: {error}", try_="--debug shows where"
        ) from error


class EmbeddedData(NamedTuple):
    """The origin of a recipe's embedded data, for the error message when that data has changed."""

    is_made: str
    """A sentence such as "the embedded texts are docstrings of six installed libraries"."""
    sources: Mapping[str, str]
    """The packages that the data is made from: keys of the recorded versions, with display names."""
    otherwise: str
    """The cause to report if the versions of all these packages are unchanged."""
    instead: str
    """The kind of data that does not change with versions, suggested in the error message."""


def explain_data_change(error: UsageError, made: EmbeddedData, then: Mapping[str, str | None]) -> UsageError:
    """Return the error for changed embedded data, with the cause.

    `then` contains the package versions at the start of the run.
    """
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
        try_=f"--fresh or {OTHER_FOLDER} to start over; to resume, install what it was started with ({before}); "
        f"{made.instead} stay the same",
    )
