"""Export a trained model to a folder that other programs can load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.api.load import load_predictor, load_run_recipe
from whet.base.errors import UsageError
from whet.report.export.files import ExportResult, publish_export
from whet.run import strict_json
from whet.run.folder import Run, open_run

EXPORT_MANIFEST = "whet-export.json"


def export_model(
    run: Run | Path | str,
    *,
    to: str,
    out: Path | str | None = None,
    force: bool = False,
    checkpoint: str = "best",
    recipe: str | None = None,
) -> ExportResult:
    """Export the model of a run to the folder `out`, by default RUN-FORMAT in the current folder.

    The folder also contains whet-export.json: the classes, the length, the inputs and the step of the weights.
    """
    run = run if isinstance(run, Run) else open_run(run)
    loaded = load_run_recipe(run, given=recipe)
    if not (loaded.supports("predict") and loaded.supports("write_model_files")):
        raise UsageError(f"the recipe {loaded.name} cannot export its model", got=to, try_="csv, parquet, tensorboard")

    # Write to a temporary folder and rename it when it is complete, so that an interrupted export leaves nothing
    # behind.
    def fill(draft: Path) -> list[str]:
        model, _, step = load_predictor(loaded, run, checkpoint=checkpoint)
        details = loaded.write_model_files(model, run.metadata, draft, to=to)
        files = sorted(file.name for file in draft.iterdir())
        manifest: dict[str, Any] = {"format": to, "run": run.header.id, "step": step, **details, "files": files}
        (draft / EXPORT_MANIFEST).write_text(strict_json.encode(manifest, pretty=True) + "\n", encoding="utf-8")
        return [*files, EXPORT_MANIFEST]

    folder = Path(out if out is not None else f"{run.path.name}-{to}").expanduser().absolute()
    return publish_export(run, folder, fill=fill, is_ours=_earlier_export_files(folder), force=force)


def _earlier_export_files(folder: Path) -> Callable[[str], bool]:
    """Return a predicate for files that an earlier export wrote to the folder. Only those may be replaced."""
    names = {EXPORT_MANIFEST}
    try:
        manifest = strict_json.decode((folder / EXPORT_MANIFEST).read_bytes())
        names |= {str(name) for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return names.__contains__
