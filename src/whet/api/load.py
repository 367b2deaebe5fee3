"""Load the results of a run: its weights into your model (`whet.load`), or its recipe with the trained model."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from whet.api.target import ScriptTraining, call_function, load_function
from whet.base.errors import UsageError, WhetError, describe_error
from whet.recipes.recipe import BUILT_IN, Recipe, load_recipe
from whet.run.folder import Run, open_run, short_path, short_script

if TYPE_CHECKING:
    from torch import nn

    from whet.recipes.chat.responder import Responder
    from whet.training.loop import TrainResult

ModelT = TypeVar("ModelT", bound="nn.Module | Mapping[str, nn.Module]")


def load(
    run: "str | Path | TrainResult | Run",
    model: ModelT,
    which: Literal["best", "last"] | int = "best",
    *,
    ema: bool = True,
) -> ModelT:
    """Load the weights of a run into a model and return the model.

    The names and shapes of all parameters and buffers must match; otherwise an error lists the mismatches and the model
    is left unchanged. Checkpoints are safetensors files: nothing is unpickled. The mode of the model (train or eval) is
    not changed.

    >>> import tempfile, torch
    >>> from whet import train
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(
    ...         model,
    ...         (torch.rand(64, 2), torch.rand(64, 1)),
    ...         loss=lambda micro: torch.nn.functional.mse_loss(model(micro.x), micro.y),
    ...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...         global_batch_size=16,
    ...         run=f"{folder}/run",
    ...         on_event=None,
    ...     )
    ...     loaded = load(result, torch.nn.Linear(2, 1), "last").eval()
    >>> torch.equal(loaded.weight, model.weight)
    True

    Args:
        run: A run folder, the result of `whet.train`, or a folder that `whet import` made.
        model: A model with the same structure as the trained one, or a dict of models as for `whet.Session`. A
            compiled model is accepted too.
        which: "best" (by the goal; "last" if the run has no goal), "last", or the step of a checkpoint.
        ema: Load the moving average of the weights if the run has one (`ema=True` in training). These are the weights
            that were evaluated. A line on standard error reports it.
    """
    from torch import nn

    from whet.checkpoint.importer import is_import
    from whet.checkpoint.snapshot import has_average
    from whet.checkpoint.snapshot_restore import restore_model
    from whet.training.callbacks.progress_line import ProgressLine
    from whet.training.optimizer_set import as_module
    from whet.training.weights import load_weights, read_checkpoint

    folder = run if isinstance(run, str | Path) else getattr(run, "path", None)
    if not isinstance(folder, str | Path):
        got = "training without a run folder" if hasattr(run, "path") else type(run).__name__
        raise UsageError("there are no weights to load", got=got, try_='whet.train(..., run="runs/mine")')
    container = as_module(model)
    if not isinstance(container, nn.Module):
        raise UsageError("the model must be an nn.Module", got=type(model).__name__, try_="whet.load(run, MyModel())")
    # torch.compile wraps the model and prefixes the name of every weight.
    inner = getattr(container, "_orig_mod", container)
    path = Path(folder).expanduser()
    if is_import(path) or path.is_file():
        load_weights(path, inner)
        return model
    snapshot, step = read_checkpoint(path, checkpoint=str(which))
    restore_model(snapshot, inner, use_average=ema, with_memory=False)
    if which == "best" and snapshot.facts["progress"]["progress"]["best_step"] is None:
        ProgressLine("load").print_line(
            f'load: the last weights, of step {step:,}: the run had no goal; goal="val_loss" in training keeps the best'
        )
    if ema and has_average(snapshot):
        ProgressLine("load").print_line(
            f"load: averaged weights (EMA) of step {step:,}; ema=False loads the weights without averaging"
        )
    return model


def recipe_spec(run: Run, *, given: str | None = None, command: str = "prove") -> str:
    """Return the recipe of a run, as accepted by `load_recipe`. A user-defined recipe must be `given`.

    A run folder may come from an untrusted source, so it must not decide which code is executed: only built-in recipes
    are loaded by the name stored in the run.
    """
    if given is None and run.header.recipe not in BUILT_IN:
        if not run.header.command:
            raise python_run_error(run, command)
        file = next((word for word in run.header.command if word.partition(":")[0].endswith(".py")), "FILE")
        raise UsageError("the run uses a custom recipe", got=run.header.recipe, try_=f"--recipe {file}")
    return given or run.header.recipe


_INSTEAD = {
    "predict": "--model {file}:make_model inputs.npy; in Python: whet.load({run!r}, model)",
    "export": "--to safetensors; or --model {file}:make_model, a function that returns the model",
}


def python_run_error(run: Run, command: str) -> UsageError:
    """Return the error for a command that needs the Python code of a run."""
    script = None if run.header.script is None else short_script(run.header.script)
    shown = short_path(run.path)
    file = "FILE.py" if script is None else shlex.quote(script.partition(":")[0])
    if command in _INSTEAD:
        hint = f"whet {command} {shlex.quote(shown)} " + _INSTEAD[command].format(file=file, run=shown)
    elif script is not None and ":" in script:
        hint = f"whet {command} {shlex.quote(script)}"
    else:
        hint = f"whet {command} {file}:main, after moving the training code into a function: def main(): ..."
    by = script or "a notebook or an interactive session"
    return UsageError("the run was trained by your own code", got=f"{shown}, by {by}", try_=hint)


def load_model(word: str) -> Any:
    """Call a user's function and return its model.

    The function may return the model or a tuple that starts with it, or it may train the model.
    """
    from torch import nn

    made = call_function(load_function(word, default=("model", "make_model", "main")), word)
    model = made.config.model if isinstance(made, ScriptTraining) else made[0] if isinstance(made, tuple) else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"{word} returns no model", got=type(model).__name__, try_="def make_model(): return Model()")
    return model


def load_run_recipe(run: Run, *, given: str | None = None, command: str = "predict") -> Recipe:
    """Load the recipe of a run. A user-defined recipe must be `given`."""
    return load_recipe(recipe_spec(run, given=given, command=command))


def load_predictor(recipe: Recipe, run: Run, *, checkpoint: str) -> tuple[Any, Any, int]:
    """Return (model, predictor, step): the model with the weights of a checkpoint, in eval mode on the CPU."""
    from whet.training.weights import load_weights

    with _missing_data_errors():
        model, predictor = recipe.predict(recipe.Config.model_validate(run.config), run.metadata)
    step = load_weights(run.path, model, checkpoint=checkpoint)
    model.eval()
    return model, predictor, step


def load_chat_model(run: Path, *, checkpoint: str, device: str) -> "Responder":
    """Load the model of a chat run onto a device, with the weights of a checkpoint."""
    from whet.device.environment import configure_before_torch

    opened = open_run(run)
    # Load only built-in recipes, because a run folder may come from anywhere and must not decide which code runs.
    recipe = load_recipe(opened.header.recipe) if opened.header.recipe in BUILT_IN else None
    if recipe is None or not recipe.supports("load_generator"):
        raise UsageError(
            "this is not a chat run", got=f"a run of {opened.header.recipe}", try_="a run of whet train chat"
        )
    configure_before_torch(mps_fallback=False)
    from whet.device.open import open_device
    from whet.training.weights import load_weights

    place = open_device(device).device
    with _missing_data_errors():
        model: Responder = recipe.load_generator(opened.metadata)
    load_weights(opened.path, model.model, checkpoint=checkpoint)
    place.put_model(model.model)
    model.model.eval()
    return model


@contextlib.contextmanager
def _missing_data_errors() -> Iterator[None]:
    """Convert errors of a recipe's methods to WhetError if the run lacks the data that they read."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WhetError(
            "the run lacks data that its recipe needs",
            got=describe_error(error),
            try_="whet runs, to choose another run",
        ) from None
