"""`whet train puzzle`: slots do not depend on micro-batches, interruptions, measuring or evaluation."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_device import FakeDevice
from whet.checkpoint import store
from whet.config.resolve import resolve_config
from whet.data.adapters import open_source
from whet.data.batch import MicroBatch, Position
from whet.data.columns import as_columns
from whet.data.padding import IGNORED_LABEL
from whet.data.split import BatchSplitter
from whet.device.cpu import CpuDevice
from whet.device.open import current_machine
from whet.device.tracing import trace_as
from whet.plan.plan import make_plan
from whet.recipes.puzzle.model import PuzzleModel, puzzle_loss, puzzle_losses, stablemax_loss
from whet.recipes.puzzle.recipe import PuzzleRecipe
from whet.recipes.puzzle.slots import Slots
from whet.recipes.runner import prepare_recipe, train_recipe
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.step.ema import Ema
from whet.step.graphs import GraphedStepper
from whet.step.optimizers import build_optimizer
from whet.step.step import Stepper
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.weights import load_weights

pytestmark = pytest.mark.torch

TINY = (
    "puzzles=70",
    "global_batch_size=16",
    "arch.hidden_size=16",
    "arch.num_heads=2",
    "arch.L_layers=1",
    "arch.L_cycles=1",
    "arch.halt_max_steps=4",
    "arch.halt_exploration_prob=0.5",
    "warmup_steps=2",
    "threads=1",
)


def a_model(*words: str) -> tuple[PuzzleModel, dict[str, Tensor]]:
    """A small model that halts some puzzles early, and its data."""
    recipe = PuzzleRecipe()
    made = prepare_recipe(recipe, resolve_config(recipe.Config, [*TINY, *words]).config)
    with torch.no_grad():
        made.model.to_halt.weight.normal_(0, 1)
        made.model.to_halt.bias.zero_()
    return made.model, made.data.train


def steps(
    model: PuzzleModel, data: dict[str, Tensor], *, number: int, micro_batch: int = 16, is_graphed: bool = False
) -> Stepper:
    """Train for some steps; the last global batch of an epoch is short."""
    device = FakeDevice() if is_graphed else CpuDevice()
    config = resolve_config(PuzzleRecipe.Config, TINY).config
    optimizer = build_optimizer(PuzzleRecipe().optimizer(config), model, device, is_captured=is_graphed)
    how = {"ema": Ema(model)}
    stepper = (
        GraphedStepper(model, optimizer, device, graphs=device.graphs(), **how)
        if is_graphed
        else Stepper(model, optimizer, device, **how)
    )
    source, position = open_source(data, device, global_batch_size=16, seed=1), Position()
    model.train()
    done = 0
    while done < number:
        for batch in source.batches(position):
            micro_batches = source.micro_batches(batch, micro_batch=micro_batch, length_mode="fixed")
            stepper(partial(puzzle_loss, model), micro_batches, num_samples=len(batch), step=done + 1)
            done, position = done + 1, batch.after
            if done == number:
                break
    return stepper


def state(model: PuzzleModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# --- micro-batches, graphs, EMA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", ["arch.mlp_t=true", "arch.mlp_t=false"])
def test_slots_do_not_depend_on_micro_batches(mixing: str) -> None:
    whole, data = a_model(mixing)
    cut = copy.deepcopy(whole)
    steps(whole, data, number=9)
    steps(cut, data, number=9, micro_batch=5)
    ours, theirs = state(cut), state(whole)
    assert 0 < int(whole.slots.halted.sum()) < 16, "some halt early, or the test shows too little"
    for name, tensor in theirs.items():
        if tensor.is_floating_point():
            assert torch.allclose(ours[name], tensor, atol=2e-3), name
        else:
            assert torch.equal(ours[name], tensor), name


def test_simulated_graph_replays_with_slots_equal_eager_steps() -> None:
    plain, data = a_model()
    graphed = copy.deepcopy(plain)
    expected = steps(plain, data, number=14, micro_batch=8)
    result = steps(graphed, data, number=14, micro_batch=8, is_graphed=True)
    assert isinstance(result, GraphedStepper)
    assert result.graph_obstacle is None
    assert result.num_captured == 2, "whole batches, and the last of an epoch"
    for name, tensor in state(plain).items():
        assert torch.equal(state(graphed)[name], tensor), name
    assert expected.ema is not None


def test_slots_and_puzzle_embeddings_are_excluded_from_ema_and_evaluation() -> None:
    model, data = a_model()
    ema = steps(model, data, number=3).ema
    assert ema is not None
    assert not [name for name in ema.average if name.startswith(("slots.", "table."))]
    assert "tokens.weight" in ema.average
    before = state(model)
    with torch.no_grad(), ema.in_place():
        model.eval()
        # In eval mode the loss changes no slots: the device comparison calls it several times.
        micro = next(
            BatchSplitter(as_columns(data), send=lambda r: r).micro_batches(
                np.arange(8), np.arange(8), micro_batch=8, length_mode="fixed"
            )
        )
        result = PuzzleRecipe().evaluate(model, iter([micro.data]))
        losses = {float(puzzle_loss(model, micro.data)) for _ in range(3)}
    assert result.keys() >= {"exact_accuracy", "exact_1", "exact_4"}
    assert result["exact_4"] == result["exact_accuracy"]
    assert len(losses) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(model).items())


# --- stopping, measuring ----------------------------------------------------------------------------------------------


def test_a_run_in_sessions_ends_with_the_same_bits_and_slots(tmp_path: Path) -> None:
    def train(run: Path, *words: str) -> None:
        recipe = PuzzleRecipe()
        train_recipe(recipe, resolve_config(recipe.Config, [*TINY, "epochs=3", "eval_every=100", *words]), run=run)

    train(tmp_path / "whole")
    for _ in range(3):
        train(tmp_path / "cut", "epochs_per_session=1")
    ends = []
    for run in (tmp_path / "whole", tmp_path / "cut"):
        result = store.load_newest(open_run(run).checkpoints)
        assert result is not None
        losses = [event.number("loss") for event in read_events(open_run(run), kinds=("step",))]
        ends.append((losses, result[1].tensors))
    assert ends[0][0] == ends[1][0]
    assert len(ends[0][0]) == 15
    assert ends[0][1].keys() == ends[1][1].keys()
    for name, tensor in ends[0][1].items():
        assert torch.equal(tensor, ends[1][1][name]), name
    slots = ends[0][1]["model/slots.steps"]
    assert len(set(slots.tolist())) > 1, "the last batches are short, so slots are apart"
    # Prediction and init_from start with empty slots.
    recipe = PuzzleRecipe()
    kept = open_run(tmp_path / "whole").metadata
    model, answer = recipe.predict(resolve_config(recipe.Config, TINY).config, kept)
    load_weights(tmp_path / "whole", model)
    assert torch.equal(model.slots.halted, torch.tensor([True]))
    (verdict,) = answer(["1... ..2. .3.. ...4"])
    assert len(verdict["label"]) == 16
    # The suggested example input works; runs on arrays have none.
    question = recipe.example_input(kept)
    assert question is not None
    assert len(answer([question])) == 1
    assert recipe.example_input({**kept, "is_sudoku": False}) is None


def test_measuring_preserves_the_slots() -> None:
    recipe = PuzzleRecipe()
    made = prepare_recipe(recipe, resolve_config(recipe.Config, TINY).config)
    machine, system_state = current_machine()
    plan = make_plan(machine, made.workload, overrides={"device": "cpu", "threads": 1}, system_state=system_state)
    training = parse_training_config(made.training)
    rig = LocalStepBench(made.model, made.optimizer, made.data.train, training, loss=made.loss, plan=plan)
    with torch.no_grad():
        rig.model.slots.halted[::2] = False
        rig.model.slots.y.normal_()
    before = state(rig.model)
    with rig:
        for settings in ({}, {"micro_batch": 4}, {"activation_checkpointing": "on"}):
            prepared = rig.prepare(settings, seconds=0.1)
            prepared.step(0)
            prepared.close()
        rig.agreement({"precision": "bf16"}, seconds=5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(rig.model).items())


# --- halting and loss -------------------------------------------------------------------------------------------------


def test_exploration_rate_and_maximum_steps() -> None:
    slots = Slots(4_000, length=1, state_shape=(1, 1), max_steps=8, exploration=0.25, seed=3)
    least = torch.stack([slots._min_steps(0, torch.full((4_000,), age)) for age in range(20)])
    assert float((least > 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    counts = torch.bincount(least[least > 0], minlength=9)
    assert counts[:2].sum() == 0
    assert counts[2:].min() > 0.9 * counts[2:].float().mean()
    # The draw depends on slot and age only.
    apart = torch.cat([slots._min_steps(first, torch.full((1_000,), 7)) for first in range(0, 4_000, 1_000)])
    assert torch.equal(apart, least[7])
    agreement = float((least[7] > 0).eq(least[8] > 0).float().mean())
    assert agreement == pytest.approx(0.25**2 + 0.75**2, abs=0.03), "one step says nothing about the next"


def test_ignored_labels_do_not_count() -> None:
    labels = torch.tensor([[1, 2, IGNORED_LABEL], [1, 0, 2], [IGNORED_LABEL] * 3])
    logits = torch.full((3, 3, 3), -2.0).scatter(-1, labels.clamp(min=0)[..., None], 3.0)
    logits[1, 2] = torch.tensor([5.0, 0.0, 1.0])
    result = puzzle_losses(logits, torch.zeros(3), labels)
    assert result.is_right.tolist() == [True, False, True]
    # s(3) = 4 and s(-2) = 1/3.
    assert result.tokens[0].item() == pytest.approx(np.log((4 + 2 / 3) / 4))
    assert result.tokens[2].item() == 0
    assert stablemax_loss(logits, labels)[0, 2].item() == 0
    # A graph traced for MPS on the CPU must not contain float64.
    with trace_as("mps"):
        assert stablemax_loss(logits, labels).dtype == torch.float32
    assert stablemax_loss(logits, labels).dtype == torch.float64
    wild = torch.tensor([[[1e30, -1e30, 1.0]]], requires_grad=True)
    stablemax_loss(wild, torch.tensor([[1]])).sum().backward()
    assert wild.grad is not None
    assert wild.grad.isfinite().all()


def test_a_batch_larger_than_the_slots_is_rejected() -> None:
    model, data = a_model()
    fields = {name: column[:8] for name, column in data.items()}
    with pytest.raises(Exception, match="more puzzles than the model has slots"):
        puzzle_loss(model, MicroBatch(fields=fields, ids=np.arange(8), first_index=12))
