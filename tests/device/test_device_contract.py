"""The contract of every device."""

import copy
import gc
import time

import pytest
import torch
from torch import nn

import whet
from small_models import TokenModel, convnet, images, ragged_tokens
from whet.data.adapters import open_source
from whet.data.batch import Position
from whet.device import virtual_mac
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.device.errors import is_out_of_memory
from whet.step.step import Stepper

pytestmark = pytest.mark.torch


def test_put_copies_the_values(device: AbstractDevice) -> None:
    tensor = torch.randn(100)
    moved = device.put(tensor)
    assert moved.device.type == device.torch_device.type
    assert torch.equal(moved.cpu(), tensor)


def test_sync_waits(device: AbstractDevice) -> None:
    if device.kind in ("cpu", "fake") or virtual_mac.installed():
        pytest.skip("computes in step with us")
    a = torch.randn(4_096, 4_096, device=device.torch_device)
    a @ a
    device.sync()
    start = time.perf_counter()
    for _ in range(50):
        a @ a
    asked = time.perf_counter() - start
    device.sync()
    done = time.perf_counter() - start
    assert done > 2 * asked, "the work took longer than the call"


def test_marks_measure_the_device_and_not_the_query(device: AbstractDevice) -> None:
    if device.kind == "fake":
        pytest.skip("has a clock of its own")
    # So long on a GPU that delays of the host hardly count.
    size = 1_024 if device.is_cpu else 3_072
    a = torch.randn(size, size, device=device.torch_device)
    a @ a
    device.sync()
    wall = time.perf_counter()
    start = device.mark()
    for _ in range(20):
        a @ a
    end = device.mark()
    device.sync()
    wall = time.perf_counter() - wall
    assert 0.3 * wall < device.elapsed_seconds(start, end) <= 1.05 * wall


def test_memory_comes_back(device: AbstractDevice) -> None:
    if device.kind in ("cpu", "fake"):
        pytest.skip("has no counter of live tensors")
    gc.collect()
    before = device.memory.usage().allocated
    tensor = torch.zeros(2**24, device=device.torch_device)
    during = device.memory.usage().allocated
    del tensor
    assert before is not None
    assert during is not None
    assert during - before >= 2**26
    assert device.memory.usage().allocated == before


def test_out_of_memory_is_recognised(device: AbstractDevice) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device.torch_device)
    assert is_out_of_memory(caught.value)


def test_the_generator_is_restored(device: AbstractDevice) -> None:
    if device.generator is None or device.kind == "fake":
        pytest.skip("the CPU's generator is the only one")
    state = device.generator.get_state()
    first = torch.rand(5, device=device.torch_device)
    device.generator.set_state(state)
    assert torch.equal(torch.rand(5, device=device.torch_device), first)


@pytest.mark.parametrize("how", ["fixed", "sorted", "bucketed", "packed"])
def test_gradients_agree_with_the_cpu_for_any_split(device: AbstractDevice, how: str) -> None:
    torch.manual_seed(0)
    on_cpu = TokenModel()
    here = copy.deepcopy(on_cpu).to(device.torch_device)
    tokens = ragged_tokens(12, longest=9, seed=0)
    actual = []
    for model, place, micro_batch, form in ((on_cpu, CpuDevice(), 12, "fixed"), (here, device, 5, how)):
        place.use_precision("fp32")
        source = open_source({"tokens": tokens}, place, global_batch_size=12, seed=0)
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), place)
        (batch,) = source.batches(Position())
        stepper(
            model.loss, source.micro_batches(batch, micro_batch=micro_batch, length_mode=form), num_samples=12, step=1
        )
        actual.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    for name in actual[0]:
        torch.testing.assert_close(actual[1][name], actual[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_small_net_learns_in_every_precision(device: AbstractDevice, precision: str) -> None:
    if device.kind in ("cpu", "fake") and precision != "fp32":
        pytest.skip("a plan chooses fp32 here")
    torch.manual_seed(0)
    model = convnet().to(device.torch_device)
    device.use_precision(precision)
    x, _ = images(256, seed=0)
    y = (x.mean((1, 2, 3)) > 0).long()
    source = open_source((x, y), device, global_batch_size=64, seed=0)
    stepper = Stepper(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        device,
        precision=precision,
        loss_scaling="dynamic" if precision == "fp16" else "off",
        clip=1.0,
    )
    losses = []
    for epoch in range(10):
        for batch in source.batches(Position(epoch=epoch)):
            micro_batches = source.micro_batches(batch, micro_batch=64, length_mode="fixed")
            outcome = stepper(
                lambda m: nn.functional.cross_entropy(model(m.x), m.y), micro_batches, num_samples=64, step=1
            )
            losses.append(outcome.loss)
    assert torch.stack(losses[-4:]).mean() < 0.7 * torch.stack(losses[:4]).mean()


def test_a_run_resumes_exactly(device: AbstractDevice, tmp_path) -> None:
    if device.kind == "fake":
        pytest.skip("not a device to train on")
    x, y = images(64, seed=0)

    def run(folder, *sittings: int) -> dict[str, torch.Tensor]:
        for max_steps in sittings:
            torch.manual_seed(0)
            model = convnet(dropout=0.3)
            whet.train(
                model,
                (x, y),
                loss=lambda m, model=model: nn.functional.cross_entropy(model(m.x), m.y),
                optimizer=whet.OptimizerChoice(lr=1e-3),
                global_batch_size=8,
                epochs=3,
                max_steps=max_steps,
                device=device.kind,
                run=tmp_path / folder,
                ema=True,
                overrides={"threads": 1},
            )
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    torch.use_deterministic_algorithms(True)
    try:
        whole, cut = run("whole", 20), run("cut", 7, 13, 20)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("returns", ["mean", "tensor weight", "number"])
def test_a_step_never_waits_for_the_gpu(device: AbstractDevice, returns: str) -> None:
    if device.kind != "cuda":
        pytest.skip("only CUDA can be asked to refuse a wait")
    tokens = ragged_tokens(64, longest=9, seed=0)
    labels = torch.zeros(64, dtype=torch.long)
    model = nn.EmbeddingBag(40, 2)

    def loss(micro):
        total = nn.functional.cross_entropy(model(micro.tokens.values), micro.label, reduction="sum")
        return {"mean": total / 4, "tensor weight": (total, micro.tokens.lengths.sum()), "number": (total, 4.0)}[
            returns
        ]

    with whet.Session(
        model,
        whet.OptimizerChoice(lr=1e-3),
        {"tokens": tokens, "label": labels},
        global_batch_size=8,
        epochs=4,
        clip=1.0,
        ema=True,
        device="cuda",
        # The weights are those of a micro-batch, whatever its samples are.
        split_batch=True,
        overrides={"micro_batch": 4},
    ) as session:
        batches = iter(session)
        for _ in range(3):
            session.step(loss, next(batches))
        waiting = next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.step(loss, waiting)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert session.state.step == 4


def test_evaluation_and_measuring_leave_the_devices_draws_alone(device: AbstractDevice) -> None:
    if device.kind == "fake":
        pytest.skip("not a device to train on")
    x, y = images(64, seed=0)
    finals = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = convnet(dropout=0.5)
        extra = {} if every is None else {"eval_every": 1, "evaluate": _noisy, "val": (x, y)}
        whet.train(
            model,
            (x, y),
            loss=lambda m, model=model: nn.functional.cross_entropy(model(m.x), m.y),
            optimizer=whet.OptimizerChoice(lr=1e-3),
            global_batch_size=16,
            epochs=2,
            device=device.kind,
            seed=1,
            on_event=None,
            overrides={"threads": 1, "micro_batch": 16},
            **extra,
        )
        finals.append({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    for name, tensor in finals[0].items():
        torch.testing.assert_close(tensor, finals[1][name], rtol=1e-5, atol=1e-6)


def _noisy(model, micro_batches):
    noise = sum(float(torch.rand(3, device=micro.x.device).sum()) for micro in micro_batches)
    return {"noise": noise}


def test_a_run_moves_to_the_cpu_and_back(device: AbstractDevice, tmp_path) -> None:
    if device.kind in ("fake", "cpu"):
        pytest.skip("there is no other device to move to")
    x, y = images(64, seed=0)
    for kind, max_steps in ((device.kind, 4), ("cpu", 8), (device.kind, 12)):
        torch.manual_seed(0)
        model = convnet()
        result = whet.train(
            model,
            (x, y),
            loss=lambda m, model=model: nn.functional.cross_entropy(model(m.x), m.y),
            optimizer=whet.OptimizerChoice(lr=1e-3),
            global_batch_size=16,
            epochs=3,
            max_steps=max_steps,
            device=kind,
            run=tmp_path / "run",
            on_event=None,
        )
        assert result.step == max_steps
    report = whet.summarize(tmp_path / "run")
    assert report.inexact_since == 4
    assert "device" in (report.inexact_reason or "")
