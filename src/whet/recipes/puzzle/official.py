"""Import checkpoints of the official implementation (SamsungSAILMontreal/TinyRecursiveModels) as puzzle runs."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.checkpoint.importer import import_weights, read_import
from whet.config.resolve import resolve_config
from whet.config.sources import read_config_file
from whet.recipes.puzzle.config import PuzzleArch, PuzzleConfig
from whet.recipes.puzzle.model import PuzzleModel, official_name
from whet.recipes.puzzle.recipe import PuzzleRecipe
from whet.recipes.runner import create_run

CONFIG_FILE = "all_config.yaml"
"""File with the training options, which the official implementation writes next to its checkpoints."""
_PREFIX = "inner."


def import_official(file: Path, out: Path, *, words: list[str], device: str = "auto") -> dict[str, float]:
    """Create a run with the weights of an official checkpoint, evaluate it on the data, and return the metrics.

    Sizes are taken from the weights, and all other options from `all_config.yaml` next to the file. The overrides in
    `words` take precedence.
    """
    if not any(word.startswith(("data=", "data_paths=")) for word in words):
        raise UsageError(
            "the checkpoint does not say what it was trained on",
            got=f"{file} without data",
            try_=f"whet import {file} --format trm data=DIR --out {out}",
        )
    with tempfile.TemporaryDirectory() as scratch:
        imported = Path(scratch) / "weights"
        import_weights(file, imported)
        tensors = _inner_tensors(read_import(imported), file)
    options = {**_config_options(file.parent / CONFIG_FILE), **_sizes_of(tensors)}
    given = {word.partition("=")[0] for word in words}
    chosen = [f"{key}={value}" for key, value in options.items() if key not in given]
    resolved = resolve_config(PuzzleConfig, [*chosen, *words])
    return create_run(
        PuzzleRecipe(), resolved, run=out, load=lambda model: load_official(model, tensors), device=device
    )


@torch.no_grad()
def load_official(model: PuzzleModel, tensors: dict[str, Tensor]) -> None:
    """Copy weights with official names (without "inner.") into a model. Slots do not change."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("slots.")}
    names = {name: official_name(name) for name in wanted}
    missing, unknown = set(names.values()) - tensors.keys(), tensors.keys() - set(names.values())
    if missing or unknown:
        raise UsageError(
            "the checkpoint does not fit the model",
            got=f"missing: {', '.join(sorted(missing)) or 'none'}; unknown: {', '.join(sorted(unknown)) or 'none'}"[
                :300
            ],
            try_="the arch.* keys that it was trained with",
        )
    for name, target in wanted.items():
        value = tensors[names[name]]
        if target.shape != value.shape:
            raise UsageError(
                f"the checkpoint's {names[name]} does not fit the model",
                got=f"{tuple(value.shape)}; the data and options imply {tuple(target.shape)}",
                try_="the data that it was trained on, and its arch.* keys",
            )
        target.copy_(value)


def _inner_tensors(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Remove everything up to "inner." from the names, because compiled models and the loss head add prefixes."""
    inner = {name.partition(_PREFIX)[2]: tensor for name, tensor in tensors.items() if _PREFIX in name}
    if "lm_head.weight" not in inner or len(inner) != len(tensors):
        raise UsageError(
            "not a checkpoint of the official implementation",
            got=f"{file}: {', '.join(list(tensors)[:3])}",
            try_="no --format",
        )
    # Drop the rotary tables, because the model computes them.
    return {name: tensor for name, tensor in inner.items() if not name.startswith("rotary_emb.")}


def _sizes_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the options that the shapes of the weights determine."""
    width = tensors["lm_head.weight"].shape[1]
    layers = {name.split(".")[2] for name in tensors if name.startswith("L_level.layers.")}
    sizes: dict[str, Any] = {"arch.hidden_size": width, "arch.L_layers": len(layers)}
    sizes["arch.mlp_t"] = "L_level.layers.0.mlp_t.down_proj.weight" in tensors
    if "embed_pos.embedding_weight" in tensors:
        sizes["arch.pos_encodings"] = "learned"
    if "puzzle_emb.weights" in tensors:
        sizes["arch.puzzle_emb_ndim"] = tensors["puzzle_emb.weights"].shape[1]
    else:
        sizes |= {"arch.puzzle_emb_ndim": 0, "arch.puzzle_emb_len": 0}
    return sizes


def _config_options(path: Path) -> dict[str, Any]:
    """Return the options in an official config file that the puzzle recipe also has."""
    if not path.is_file():
        return {}
    content = read_config_file(path)
    arch = content.get("arch", {})
    options = {f"arch.{key}": arch[key] for key in PuzzleArch.model_fields if key in arch}
    if "lr_warmup_steps" in content:
        options["warmup_steps"] = content["lr_warmup_steps"]
    own = ("global_batch_size", "lr", "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay", "ema", "seed")
    return options | {key: content[key] for key in own if content.get(key) is not None}
