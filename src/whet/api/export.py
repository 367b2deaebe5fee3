"""Export a trained model to a folder that other programs can load."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from whet.api.load import load_model, load_predictor, load_run_recipe
from whet.base.errors import UsageError
from whet.report.export.files import ExportResult, publish_export
from whet.run import durable, strict_json
from whet.run.folder import Run, open_run

EXPORT_MANIFEST = "whet-export.json"
WEIGHTS_FILE = "model.safetensors"


def export_model(
    run: Run | Path | str,
    *,
    to: str,
    out: Path | str | None = None,
    force: bool = False,
    checkpoint: str = "best",
    recipe: str | None = None,
    model: str | None = None,
) -> ExportResult:
    """Export the model of a run to the folder `out`, by default RUN-FORMAT in the current folder.

    The folder also contains whet-export.json with the step of the weights and the recipe's facts about the model. For a
    run that was trained from Python, every format except safetensors needs `model`: a function that returns the model.
    """
    run = run if isinstance(run, Run) else open_run(run)
    write = _writer(run, to=to, checkpoint=checkpoint, recipe=recipe, model=model)

    # Write to a temporary folder and rename it when it is complete, so that an interrupted export leaves nothing
    # behind.
    def fill(draft: Path) -> list[str]:
        step, details = write(draft)
        files = sorted(file.name for file in draft.iterdir())
        manifest: dict[str, Any] = {"format": to, "run": run.header.id, "step": step, **details, "files": files}
        # The libraries that write models do not sync them.
        durable.sync_files(draft)
        text = strict_json.encode(manifest, pretty=True) + "\n"
        durable.write_draft(draft / EXPORT_MANIFEST, data=text.encode(), is_last=True)
        return [*files, EXPORT_MANIFEST]

    folder = Path(out if out is not None else f"{run.path.name}-{to}").expanduser().absolute()
    return publish_export(run, folder, fill=fill, is_ours=_earlier_export_files(folder), force=force)


Writer = Callable[[Path], tuple[int, dict[str, Any]]]
"""Write the files of a model into a folder. Return the step of the weights and facts for the manifest."""


def _writer(run: Run, *, to: str, checkpoint: str, recipe: str | None, model: str | None) -> Writer:
    if model is not None:
        return partial(_write_own_model, run, load_model(model), to=to, checkpoint=checkpoint)
    if to == "safetensors":
        return partial(_write_checkpoint, run, checkpoint=checkpoint)
    loaded = load_run_recipe(run, given=recipe, command="export")
    if not (loaded.supports("predict") and loaded.supports("write_model_files")):
        raise UsageError(
            f"the recipe {loaded.name} cannot export its model so", got=f"--to {to}", try_="--to safetensors"
        )

    def write(folder: Path) -> tuple[int, dict[str, Any]]:
        trained, _, step = load_predictor(loaded, run, checkpoint=checkpoint)
        return step, loaded.write_model_files(trained, run.metadata, folder, to=to)

    return write


def _write_checkpoint(run: Run, folder: Path, *, checkpoint: str) -> tuple[int, dict[str, Any]]:
    """Write the weights of a checkpoint unchanged, without building a model. Shared weights are written once."""
    from safetensors.torch import save_file

    from whet.checkpoint.snapshot import has_average, trained_weights
    from whet.training.weights import read_checkpoint

    snapshot, step = read_checkpoint(run.path, checkpoint=checkpoint)
    save_file(trained_weights(snapshot), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return step, {"ema": has_average(snapshot)}


def _write_own_model(run: Run, model: Any, folder: Path, *, to: str, checkpoint: str) -> tuple[int, dict[str, Any]]:
    """Load the weights of the run into the model that the user's function returned, and write the model."""
    from safetensors.torch import save_model

    from whet.training.weights import load_weights

    if to == "onnx" or (to == "transformers" and not hasattr(model, "save_pretrained")):
        hint = "torch.onnx.export(whet.load(run, model), inputs)" if to == "onnx" else "--to safetensors"
        raise UsageError(f"this model cannot be exported to {to}", got=type(model).__name__, try_=hint)
    step = load_weights(run.path, model, checkpoint=checkpoint)
    if to == "transformers":
        model.save_pretrained(str(folder))
    else:
        save_model(model, str(folder / WEIGHTS_FILE))
    return step, {"model": type(model).__name__}


def _earlier_export_files(folder: Path) -> Callable[[str], bool]:
    """Return a predicate that is true for files of an earlier export, which are the only files that may be replaced."""
    names = {EXPORT_MANIFEST}
    try:
        manifest = strict_json.decode((folder / EXPORT_MANIFEST).read_bytes())
        names |= {str(name) for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return names.__contains__
