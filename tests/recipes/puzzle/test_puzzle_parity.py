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

CASES = ("attention_rope", "attention_learned", "mixer")
MAX_ROUNDING = 4
"""Maximum distance from the recorded figures, in multiples of the model's own rounding.

The figures were recorded in float32. Compared with float32 here, their distance would depend on the kernels of the
machine, so the model computes in float64, and once more in float32 to show how far rounding takes this model.
"""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_batches", [(6,), (4, 2)], ids=["one", "two"])
def test_four_consecutive_steps_agree(name: str, micro_batches: tuple[int, ...]) -> None:
    case, recorded = read_case(name)
    exact, rounded = (official_model(case["config"], recorded).to(dtype) for dtype in (torch.float64, torch.float32))
    for number, expected in enumerate(case["steps"]):
        here = {n.removeprefix(f"step{number}."): t for n, t in recorded.items() if n.startswith(f"step{number}.")}
        loss, ours = step(exact, here, micro_batches)
        _, float32 = step(rounded, here, micro_batches)
        for slots in (exact.slots, rounded.slots):
            assert torch.equal(slots.inputs, here["slot.inputs"].long())
            assert torch.equal(slots.labels, here["slot.labels"].long())
            assert torch.equal(slots.puzzles, here["slot.puzzle_identifiers"].long())
            assert torch.equal(slots.steps, here["count"].long())
            assert torch.equal(slots.halted, here["halted"].bool())
            assert int(slots.halted.sum()) == expected["halted"]
        assert loss * len(here["q_halt"]) == pytest.approx(expected["loss"], rel=1e-6)
        rows = torch.zeros_like(ours["table.weight"])
        rows.index_add_(0, here["puzzle_row_ids"].long(), here["grad.puzzle_rows"].double())
        theirs = {n: here[f"grad.inner.{official_name(n)}"] for n, _ in exact.named_parameters() if n != "table.weight"}
        theirs |= {"table.weight": rows} | {n: here[n] for n in ("logits", "q_halt", "y", "z")}
        assert ours.keys() == theirs.keys()
        assert len(theirs) - 4 == sum(n.startswith("grad.") for n in here)
        for key, tensor in theirs.items():
            scale = float(tensor.abs().max())
            rounding = max(apart(ours[key], float32[key]), 1e-6 * scale)
            assert apart(ours[key], tensor) <= MAX_ROUNDING * rounding, key
            assert rounding < 1e-3 * max(scale, 1.0), "rounding would hide an error"


def step(
    model: PuzzleModel, recorded: dict[str, Tensor], micro_batches: tuple[int, ...]
) -> tuple[float, dict[str, Tensor]]:
    """One step as in training: a loss for each micro-batch, weighted by its share.

    Return the loss, and outputs, states and gradients by name.
    """
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
    states = {"y": model.slots.y.clone(), "z": model.slots.z.clone()}
    return total, {"logits": logits, "q_halt": halt[:, 0], **states, **gradients}


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
