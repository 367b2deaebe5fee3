"""One of several processes that train together, over gloo; each writes what it has at the end."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import whet
from whet.data.batch import MicroBatch
from whet.distributed import strategies
from whet.distributed.group import current_group
from whet.recipes.runner import prepare_recipe, recipe_evaluation

STEPS = 5
DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")
"""cuda tries the same with processes that share one GPU, over gloo."""


def main(arguments: list[str]) -> int:
    rank, size, port, folder, names, steps, fault = arguments
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    if os.environ.get("WHET_TEST_COMPILER") is None:
        # Traced and differentiated as in a run, without the C++ compiler, which takes most of the time.
        compile_module = nn.Module.compile
        nn.Module.compile = lambda self, **options: compile_module(self, backend="aot_eager", **options)  # type: ignore[method-assign]
    out = Path(folder)
    with planted(fault):
        for name in names.split(","):
            actual, numbers = SCENES[name](out, int(steps))
            if rank == "0":
                whole = {key: tensor.detach().cpu().clone() for key, tensor in actual.items()}
                save_file(whole, out / f"{name}-{size}.safetensors")
            (out / f"{name}-{size}-{rank}.json").write_text(json.dumps(numbers))
    current_group().barrier()
    return 0


# --- training --------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Rows of one length, and a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows)))


class Again:
    """Samples that can only be read in order."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def gradients(_: Path, __: int) -> tuple[dict[str, Tensor], Any]:
    """Gradients of a few steps, in batches of 5; the last one of an epoch has one sample.

    Means over a table, sums with weights over a dataset that is read sample by sample, means over a stream.
    """
    actual: dict[str, Tensor] = {}
    losses: dict[str, float] = {}
    torch.manual_seed(7)
    rows, labels, weights = torch.randn(11, 6), torch.randint(0, 3, (11,)), torch.rand(11) * 5
    table = {"rows": rows, "labels": labels, "weights": weights}
    samples = [{name: column[place] for name, column in table.items()} for place in range(11)]
    for kind, data in (("mean", table), ("sum", samples), ("stream", Again(samples))):
        torch.manual_seed(1)
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps: list[int] = []

        def keep(*_: Any, kind: str = kind, model: nn.Module = model, steps: list[int] = steps) -> None:
            steps.append(1)
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) == name.startswith("unused")
                if parameter.grad is not None:
                    actual[f"{kind}/{len(steps)}/{name}"] = parameter.grad.detach().clone()

        optimizer.register_step_pre_hook(keep)

        def record_loss(event: str, fields: dict[str, Any], kind: str = kind) -> None:
            # At the end of an epoch; others are logged by time.
            if event == "step" and fields["step"] % 3 == 0:
                losses[f"{kind}/{fields['step']}"] = fields["loss"]

        def loss(micro: MicroBatch, kind: str = kind, model: nn.Module = model) -> Any:
            each = nn.functional.cross_entropy(model(micro.rows), micro.labels, reduction="none")
            return each.mean() if kind != "sum" else ((each * micro.weights).sum(), micro.weights.sum())

        whet.train(
            model,
            data,
            loss=loss,
            optimizer=optimizer,
            global_batch_size=5,
            overrides={"micro_batch": 2, "precision": "fp32"},
            # The check of the loss would find some of the planted faults before the first step.
            split_batch=True,
            epochs=2,
            clip=0.5,
            on_event=record_loss,
            device=DEVICE,
        )
        assert len(steps) == 6
    return actual, losses


def left_out(_: Path, __: int) -> tuple[dict[str, Tensor], Any]:
    """Gradients where samples of one kind reach parameters that no other reaches, and some steps have none of them."""
    actual: dict[str, Tensor] = {}
    torch.manual_seed(3)
    rows, labels, kinds = torch.randn(48, 6), torch.randint(0, 3, (48,)), torch.zeros(48, dtype=torch.int64)
    # Of the batches of 8: the first sample, the last one, all, two in the middle, none, one. Two processes make the
    # fifth step again, and look for what is left out from then on.
    kinds[[0, 15, *range(16, 24), 27, 28, 41]] = 1
    model = Small()
    model.unused, model.rare = nn.Identity(), nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    steps: list[int] = []

    def keep(*_: Any) -> None:
        steps.append(1)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                actual[f"{len(steps)}/{name}"] = parameter.grad.detach().clone()

    optimizer.register_step_pre_hook(keep)

    def loss(micro: MicroBatch) -> Tensor:
        logits, is_rare = model(micro.rows), micro.kinds == 1
        if is_rare.any():
            logits = logits.index_add(0, is_rare.nonzero()[:, 0], model.rare(micro.rows[is_rare]))
        return nn.functional.cross_entropy(logits, micro.labels)

    whet.train(
        model,
        {"rows": rows, "labels": labels, "kinds": kinds},
        loss=loss,
        optimizer=optimizer,
        global_batch_size=8,
        overrides={"micro_batch": 2, "precision": "fp32"},
        epochs=2,
        shuffle=False,
        on_event=None,
        measure=False,
        device=DEVICE,
    )
    assert len(steps) == 12
    return actual | dict(model.named_parameters()), []


def recipe_scene(name: str, words: Callable[[Path], list[str]]) -> Callable[[Path, int], tuple[dict[str, Tensor], Any]]:
    def scene(folder: Path, steps: int, sharding: str = "off") -> tuple[dict[str, Tensor], Any]:
        from whet.config.resolve import resolve_config
        from whet.recipes.recipe import load_recipe

        recipe = load_recipe(name)
        reported = [
            *words(folder),
            f"max_steps={steps}",
            "dropout=0",
            "warmup_steps=2",
            "lr=1e-3",
            "threads=1",
            "eval_every=50",
        ]
        resolved = resolve_config(recipe.Config, reported)
        made = prepare_recipe(recipe, resolved.config)
        first = [parameter.detach().clone() for parameter in made.model.parameters()]
        overrides = {"precision": "fp32", **resolved.overrides, **({"sharding": sharding} if sharding != "off" else {})}
        result = whet.train(
            made.model,
            made.data.train,
            loss=made.loss,
            optimizer=made.optimizer,
            evaluate=recipe_evaluation(recipe),
            val=made.data.val,
            device=DEVICE,
            overrides=overrides,
            workload=made.workload,
            goal=recipe.goal,
            on_event=None,
            measure=False,
            **made.training,
        )
        assert result.step == steps
        actual = {key: gathered(tensor) for key, tensor in made.model.named_parameters()}
        moved = sum(float((now.cpu() - then).abs().sum()) for now, then in zip(actual.values(), first, strict=True))
        whole = sum(float(then.abs().sum()) for then in first)
        return actual, {**result.metrics, "moved": moved / whole}

    return scene


def gathered(tensor: Tensor) -> Tensor:
    from whet.distributed import sharded

    return sharded.full_tensor(tensor.detach())


def _text(folder: Path) -> list[str]:
    return [
        f"data={folder / 'texts.jsonl'}",
        "arch.hidden_size=16",
        "arch.layers=1",
        "arch.heads=2",
        "global_batch_size=9",
        "micro_batch=2",
        "epochs=99",
    ]


def _chat(folder: Path) -> list[str]:
    shape = ["arch.hidden_size=32", "arch.L_layers=1", "arch.num_heads=2", "arch.seq_len=64"]
    return [f"data={folder / 'prepared'}", *shape, "global_batch_size=5", "micro_batch=2", "epochs=99"]


def _hex(_: Path) -> list[str]:
    shape = ["size=4", "games=30", "arch.depth=1", "arch.width=8", "ema=True"]
    return [*shape, "global_batch_size=33", "micro_batch=8", "epochs=99"]


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(nn.functional.gelu(self.up(self.norm(rows))))


class OwnModel(nn.Module):
    """A user's model with blocks, which can be sharded and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


def own_scene(*, has_choice: bool = False, **overrides: str) -> Callable[[Path, int], tuple[dict[str, Tensor], Any]]:
    """A user's model with a user's optimizer, whose kernels are left open, or with one that is built for shards."""

    def scene(folder: Path, _: int) -> tuple[dict[str, Tensor], Any]:
        from whet.step.compilation import num_graphs

        torch.manual_seed(5)
        model = OwnModel()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if has_choice:
            optimizer = whet.OptimizerChoice(lr=0.01)
        flags: list[Any] = []
        rows, labels = torch.randn(32, 6), torch.randint(0, 3, (32,))
        run = folder / f"own-{has_choice}-{'-'.join(overrides.values())}-{os.environ['WORLD_SIZE']}"
        before = num_graphs()

        def loss(micro: MicroBatch) -> Tensor:
            flags.append(has_choice or optimizer.param_groups[0]["fused"])
            return nn.functional.cross_entropy(model(micro.rows), micro.labels)

        whet.train(
            model,
            {"rows": rows, "labels": labels},
            loss=loss,
            optimizer=optimizer,
            global_batch_size=8,
            epochs=3,
            clip=1.0,
            overrides={"precision": "fp32", "micro_batch": 4, **overrides},
            run=run,
            on_event=None,
            measure=False,
            device=DEVICE,
        )
        plan = json.loads((run / "plan.json").read_text())["settings"]
        chosen = {name: plan[name]["value"] for name in ("optimizer_kernels", "compile", "sharding")}
        actual = {key: gathered(tensor) for key, tensor in model.named_parameters()}
        return actual, {**chosen, "was_fused": flags[-1], "graphs": num_graphs() - before}

    return scene


# --- evaluation ------------------------------------------------------------------------------------------------------


class Ids:
    """An evaluation that counts how often each sample was seen."""

    def __call__(self, model: nn.Module, micro_batches: Iterator[MicroBatch]) -> dict[str, float]:
        return self.merge_metrics(model, [self.partial_metrics(model, micro_batches)])

    def partial_metrics(self, model: nn.Module, micro_batches: Iterator[MicroBatch]) -> list[int]:
        return [int(number) for micro in micro_batches for number in micro.sample_ids]

    def merge_metrics(self, model: nn.Module, parts: list[list[int]]) -> dict[str, float]:
        seen = [number for part in parts for number in part]
        return {"seen": len(seen), "different": len({*seen}), "most": max(map(len, parts))}


def evaluation(_: Path, __: int) -> tuple[dict[str, Tensor], Any]:
    """Of 7 and of 1 samples, two at once: tables, datasets and a function that knows nothing of processes."""
    torch.manual_seed(0)
    model = Small()
    rows, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))
    actual = []
    for number in (7, 1):
        for val in ({"rows": rows[:number]}, [{"rows": row} for row in rows[:number]]):
            for evaluate in (
                Ids(),
                lambda model, micro_batches: {"seen": sum(len(micro.sample_ids) for micro in micro_batches)},
            ):
                result = whet.train(
                    model,
                    {"rows": rows, "labels": labels},
                    loss=lambda micro: nn.functional.cross_entropy(model(micro.rows), micro.labels),
                    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                    evaluate=evaluate,
                    val=val,
                    global_batch_size=8,
                    overrides={"eval_batch": 2},
                    max_steps=1,
                    on_event=None,
                    measure=False,
                    device=DEVICE,
                )
                actual.append(result.metrics)
    return {}, actual


def draws(_: Path, __: int) -> tuple[dict[str, Tensor], Any]:
    """The random draws of each process in its steps."""
    torch.manual_seed(0)
    model, drawn = Small(), []
    # Otherwise the first step would run twice and draw twice.
    model.unused = nn.Identity()
    rows, labels = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def loss(micro: MicroBatch) -> Tensor:
        drawn.append(float(torch.rand(())))
        return nn.functional.cross_entropy(model(micro.rows), micro.labels)

    for _again in range(2):
        whet.train(
            model,
            {"rows": rows, "labels": labels},
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            split_batch=True,
            global_batch_size=4,
            epochs=2,
            overrides={"micro_batch": 4},
            on_event=None,
            measure=False,
            device=DEVICE,
        )
    return {}, drawn


def one_fails(_: Path, __: int) -> tuple[dict[str, Tensor], Any]:
    """The second process fails in its third step."""
    torch.manual_seed(0)
    model, calls = Small(), []
    rows, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))

    def loss(micro: MicroBatch) -> Tensor:
        calls.append(1)
        if len(calls) == 3 and not current_group().is_rank_zero:
            raise OSError("the disk of the second process is gone")
        return nn.functional.cross_entropy(model(micro.rows), micro.labels)

    whet.train(
        model,
        {"rows": rows, "labels": labels},
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        split_batch=True,
        global_batch_size=4,
        overrides={"micro_batch": 4},
        on_event=None,
        measure=False,
        device=DEVICE,
    )
    return {}, []


def bad_numbers(folder: Path, _: int) -> tuple[dict[str, Tensor], Any]:
    """A NaN sample: the run rolls back to its last checkpoint and skips that step."""
    torch.manual_seed(0)
    model, logged = Small(), []
    rows, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))

    def bad_loss(micro: MicroBatch) -> Tensor:
        loss = nn.functional.cross_entropy(model(micro.rows), micro.labels)
        return loss * float("nan") if 13 in micro.sample_ids else loss

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "skip" or "rollback_reason" in fields:
            logged.append(kind)

    whet.train(
        model,
        {"rows": rows, "labels": labels},
        loss=bad_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=5,
        overrides={"micro_batch": 2, "checkpoint_steps": 2, "precision": "fp32"},
        split_batch=True,
        run=folder / f"bad-{current_group().ranks.size}",
        on_event=on_event,
        measure=False,
        device=DEVICE,
    )
    return dict(model.named_parameters()), logged


def endless(folder: Path, _: int) -> tuple[dict[str, Tensor], Any]:
    """Run until one rank receives a stop signal."""
    torch.manual_seed(0)
    model = Small()
    rows, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))

    def loss(micro: MicroBatch) -> Tensor:
        (folder / f"began-{current_group().ranks.rank}").touch()
        return nn.functional.cross_entropy(model(micro.rows), micro.labels)

    result = whet.train(
        model,
        {"rows": rows, "labels": labels},
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
        global_batch_size=4,
        epochs=10**6,
        overrides={"micro_batch": 4},
        on_event=None,
        measure=False,
        device=DEVICE,
    )
    return {}, [result.state, result.exit_code, result.step]


text, chat, hexes = recipe_scene("text", _text), recipe_scene("chat", _chat), recipe_scene("hex", _hex)
SCENES: dict[str, Any] = {
    "gradients": gradients,
    "left out": left_out,
    "text": text,
    "chat": chat,
    "hex": hexes,
    "text-sharded": lambda folder, steps: text(folder, steps, "full"),
    "chat-sharded": lambda folder, steps: chat(folder, steps, "full"),
    "hex-sharded": lambda folder, steps: hexes(folder, steps, "full"),
    "evaluation": evaluation,
    "draws": draws,
    "one fails": one_fails,
    "endless": endless,
    "bad numbers": bad_numbers,
    "own": own_scene(),
    "own-choice": own_scene(has_choice=True),
    "own-sharded": own_scene(has_choice=True, sharding="full"),
    "own-compiled": own_scene(compile="blocks"),
    "own-sharded-compiled": own_scene(has_choice=True, sharding="full", compile="blocks"),
}


# --- faults that a test must find ------------------------------------------------------------------------------------


def planted(fault: str) -> Any:
    if fault == "averaged":
        return mock.patch.object(strategies.ReplicatedStrategy, "seed", return_value=None)
    if fault == "own weights":
        real = strategies.ReplicatedStrategy.totals

        def own(self: Any, loss: Tensor, weight: Any) -> Any:
            real(self, loss, weight)
            return loss, weight

        return mock.patch.object(strategies.ReplicatedStrategy, "totals", own)
    if fault == "zeros stay":
        return mock.patch.object(strategies.ReplicatedStrategy, "totals", lambda _self, loss, weight: (loss, weight))
    if fault == "stand-ins count":
        from whet.data import split

        return mock.patch.object(split, "replace", lambda micro, **_: micro)
    if fault == "everybody sees all":
        from whet.data.split import RankShare
        from whet.training import evaluator

        def see_all(self: Any, data: Any) -> Any:
            return self._micro_batches(data, RankShare())

        return mock.patch.object(evaluator.Evaluator, "_own_batches", see_all)
    assert fault == "none", fault
    return mock.MagicMock()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
