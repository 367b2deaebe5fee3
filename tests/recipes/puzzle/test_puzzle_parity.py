"""The puzzle model beside the official implementation: the same weights, batches and slots give the same numbers.

The figures were recorded from that implementation, which is not needed here; SOURCE.txt beside them says how.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from whet.data.batch import MicroBatch
from whet.recipes.puzzle.config import PuzzleArch, Sizes
from whet.recipes.puzzle.model import PuzzleModel, official_name, puzzle_loss

pytestmark = pytest.mark.torch

CASES = {"attention_rope": (3e-5, 1e-5), "attention_learned": (3e-5, 1e-5), "mixer": (1e-3, 2e-4)}
"""Tolerances of logits and states, and of gradients, relative to the largest entry of the tensor.

They are the rounding of the recorded figures, which were computed in float32. Here the model computes in float64:
in float32, the distance would depend on the kernels of the machine (the mixer amplifies rounding the most).
"""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_batches", [(6,), (4, 2)], ids=["one", "two"])
def test_four_consecutive_steps_agree(name: str, micro_batches: tuple[int, ...]) -> None:
    case, recorded = read_case(name)
    model = official_model(case["config"], recorded).double()
    close, close_gradients = CASES[name]
    for number, expected in enumerate(case["steps"]):
        here = {n.removeprefix(f"step{number}."): t for n, t in recorded.items() if n.startswith(f"step{number}.")}
        logits, halt, loss, gradients = step(model, here, micro_batches)
        slots = model.slots
        assert torch.equal(slots.inputs, here["slot.inputs"].long())
        assert torch.equal(slots.labels, here["slot.labels"].long())
        assert torch.equal(slots.puzzles, here["slot.puzzle_identifiers"].long())
        assert torch.equal(slots.steps, here["count"].long())
        assert torch.equal(slots.halted, here["halted"].bool())
        assert int(slots.halted.sum()) == expected["halted"]
        assert apart(logits, here["logits"]) <= close
        assert apart(halt, here["q_halt"]) <= close
        assert apart(slots.y, here["y"]) <= close
        assert apart(slots.z, here["z"]) <= close
        assert loss * len(halt) == pytest.approx(expected["loss"], rel=1e-6)
        rows = torch.zeros_like(gradients["table.weight"])
        rows.index_add_(0, here["puzzle_row_ids"].long(), here["grad.puzzle_rows"].double())
        for ours, gradient in gradients.items():
            theirs = rows if ours == "table.weight" else here[f"grad.inner.{official_name(ours)}"]
            assert apart(gradient, theirs) <= close_gradients * float(theirs.abs().max()), ours
        assert len(gradients) == sum(n.startswith("grad.") for n in here)


def step(
    model: PuzzleModel, recorded: dict[str, Tensor], micro_batches: tuple[int, ...]
) -> tuple[Tensor, Tensor, float, dict[str, Tensor]]:
    """One step as in training: a loss for each micro-batch, weighted by its share."""
    outputs: list[tuple[Tensor, ...]] = []
    handle = model.register_forward_hook(lambda _model, _inputs, result: outputs.append(result))
    model.zero_grad(set_to_none=True)
    total, first, size = 0.0, 0, sum(micro_batches)
    for number in micro_batches:
        fields = {
            "inputs": recorded["batch.inputs"],
            "labels": recorded["batch.labels"],
            "puzzles": recorded["batch.puzzle_identifiers"],
        }
        fields = {name: rows[first : first + number] for name, rows in fields.items()}
        micro = MicroBatch(fields=fields, ids=np.arange(first, first + number), first_index=first)
        loss = puzzle_loss(model, micro) * (number / size)
        loss.backward()
        total, first = total + float(loss.detach()), first + number
    handle.remove()
    logits, halt = (torch.cat([result[at] for result in outputs]).detach() for at in (2, 3))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits, halt[:, 0], total, gradients


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def read_case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = os.environ.get("WHET_TEST_DATA")
    place = Path(folder or "") / "trm-reference"
    if folder is None or not place.is_dir():
        pytest.skip("WHET_TEST_DATA names no folder with trm-reference/: recorded figures of the official model")
    return json.loads((place / f"{name}.json").read_text()), load_file(place / f"{name}.safetensors")


def official_model(config: dict[str, Any], recorded: dict[str, Tensor]) -> PuzzleModel:
    """A model of the recorded sizes with the recorded weights."""
    given = {name: config[name] for name in PuzzleArch.model_fields if name in config}
    arch = PuzzleArch.model_validate({**given, "halt_exploration_prob": 0.0})
    sizes = Sizes(
        num_tokens=config["vocab_size"], length=config["seq_len"], num_puzzles=config["num_puzzle_identifiers"]
    )
    model = PuzzleModel(arch, sizes, num_slots=config["batch_size"], seed=0)
    theirs = {}
    for name, tensor in recorded.items():
        if name.startswith("state."):
            # Prefixes added by torch.compile, by the loss head and by the halting wrapper, in this order.
            for prefix in ("state.", "_orig_mod.", "model.", "inner."):
                name = name.removeprefix(prefix)
            theirs[name] = tensor
    ours = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("slots.")}
    assert {official_name(name) for name in ours} == {*theirs}
    model.load_state_dict({name: theirs[official_name(name)] for name in ours}, strict=False)
    return model
