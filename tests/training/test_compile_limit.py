"""Compiling in the user's process: time limits that interrupt it, and models that are compiled for every shape."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from whet.autotune.step_bench import ProbeFailedError
from whet.data.loader import with_loader_options
from whet.device.open import current_machine
from whet.plan.plan import make_plan
from whet.step.compilation import num_graphs
from whet.step.optimizers import OptimizerChoice
from whet.training import step_bench
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"),
]

FAR = 600.0


@pytest.fixture(autouse=True)
def _as_the_compiler_found_it(monkeypatch, tmp_path):
    """torch's compiler sets an environment variable and does not remove it."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    monkeypatch.setenv("WHET_HOME", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_with(monkeypatch, backend):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def as_it_is(graph, _):
    return graph.forward


def hang(graph, _):
    # As a library would do.
    while True:
        try:
            time.sleep(FAR)
        except Exception:
            continue


def test_a_gpu_needs_less_time_to_compile(monkeypatch):
    """Simulated: the plan is for a GPU."""
    with a_bench(Mean()) as bench:
        assert bench._limit_obstacle(6.0) == "6 s are too few to compile in"
        monkeypatch.setattr(step_bench, "device_kind", lambda _: "cuda")
        assert bench._limit_obstacle(6.0) is None
        assert bench._limit_obstacle(4.0) == "4 s are too few to compile in"


class Mean(nn.Module):
    def __init__(self, *, is_fixed: bool = False) -> None:
        super().__init__()
        self.inner, self.is_fixed = nn.Linear(4, 4), is_fixed

    def forward(self, x):
        # A number that the compiler treats as a constant.
        factor = float(str(x.shape[1])) if self.is_fixed else 1.0
        return self.inner(x).mean((1, 2)) * factor


def a_bench(model, data=None, *, may_compile=False):
    data = (torch.randn(64, 3, 4),) if data is None else data
    options = {} if isinstance(data, DataLoader) else {"global_batch_size": 8}
    training = parse_training_config(with_loader_options(data, options))
    machine, system_state = current_machine()
    workload = describe_workload(model, data, training, recipe="net")
    overrides = {"threads": 1, "device": "cpu", "workers": 0}
    plan = make_plan(machine, workload, overrides=overrides, system_state=system_state)
    return LocalStepBench(
        model, OptimizerChoice(), data, training, loss=lambda batch: model(batch[0]).square().mean(), plan=plan,
        may_compile=may_compile,
    )  # fmt: skip


def test_model_is_compiled_in_this_process_if_time_allows(monkeypatch):
    compile_with(monkeypatch, as_it_is)
    with a_bench(Mean()) as bench:
        with pytest.raises(ProbeFailedError, match="9 s are too few to compile in") as refused:
            bench.prepare({"compile": "on"}, seconds=9.0)
        assert refused.value.kind == "unsupported"
        before = num_graphs()
        bench.prepare({"compile": "on"}, seconds=FAR).close()
        assert num_graphs() > before


def test_compilation_that_hangs_is_interrupted_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(step_bench, "_MIN_COMPILE_SECONDS", 0.0)
    model = Mean()
    weights = model.inner.weight.detach().clone()
    with a_bench(model) as bench:
        base = bench.prepare({}, seconds=FAR)
        with monkeypatch.context() as hanging:
            compile_with(hanging, hang)
            start = time.monotonic()
            with pytest.raises(ProbeFailedError, match=r"interrupted after 3\.0 s") as stopped:
                bench.prepare({"compile": "on"}, seconds=3.0)
            assert stopped.value.kind == "timeout"
            assert time.monotonic() - start < FAR
        assert model._compiled_call_impl is None
        assert base.step(0) > 0
        # The compiler works again.
        compile_with(monkeypatch, as_it_is)
        before = num_graphs()
        bench.prepare({"compile": "on"}, seconds=FAR).close()
        assert num_graphs() > before
    assert torch.equal(model.inner.weight, weights)
    assert threading.active_count() < 100


def test_nothing_is_compiled_where_it_could_not_be_interrupted(monkeypatch):
    compile_with(monkeypatch, hang)

    def attempt():
        with a_bench(Mean()) as bench:
            bench.prepare({"compile": "on"}, seconds=FAR)

    with ThreadPoolExecutor() as pool, pytest.raises(ProbeFailedError, match="only the main thread") as refused:
        pool.submit(attempt).result()
    assert refused.value.kind == "unsupported"


@pytest.mark.parametrize("is_fixed", [False, True])
def test_model_that_is_compiled_for_every_shape_is_refused(monkeypatch, is_fixed):
    """Batches have eight lengths. torch compiles the first one, and then one graph for all of them if it can."""
    compile_with(monkeypatch, as_it_is)
    samples = [torch.randn(2 + index // 4, 4) for index in range(32)]
    data = DataLoader(samples, batch_size=4, collate_fn=lambda rows: (torch.stack(rows),))
    with a_bench(Mean(is_fixed=is_fixed), data, may_compile=True) as bench:
        before = num_graphs()
        if is_fixed:
            with pytest.raises(ProbeFailedError, match="compiled again for every new shape"):
                bench.prepare({"compile": "on"}, seconds=FAR)
            assert num_graphs() - before >= 8
            return
        bench.prepare({"compile": "on"}, seconds=FAR).close()
        assert num_graphs() - before <= 3
