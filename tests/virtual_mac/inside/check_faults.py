"""Simulated faults on a virtual m2-air-8gb; test_virtual_faults.py starts these checks with `pytest --virtual-mac`."""

import gc
import time

import psutil
import pytest
import torch
from torch import nn

from whet.base.errors import UsageError
from whet.device import virtual_mac
from whet.device.open import current_machine
from whet.device.virtual_mac import (
    GpuFailure,
    GraphCache,
    Heat,
    HeldMemory,
    KilledByPressure,
    Miscompute,
    has_strided_weight,
    reduces_over,
    simulate,
)
from whet.machine.facts import SystemState

MIB = 2**20


@pytest.fixture(autouse=True)
def _healthy_afterwards():
    gc.collect()
    torch.mps.empty_cache()
    virtual_mac.reset_stats()
    yield
    virtual_mac.uninstall()
    virtual_mac.install("m2-air-8gb")


def test_simulated_memory_of_others_adds_up_and_is_given_back() -> None:
    before = torch.mps.driver_allocated_memory()
    with simulate(HeldMemory(100 * MIB)), simulate(HeldMemory(10 * MIB)):
        virtual_mac.hold_memory(MIB)
        virtual_mac.hold_memory(2 * MIB)
        assert torch.mps.driver_allocated_memory() - before == 112 * MIB
    assert torch.mps.driver_allocated_memory() - before == 2 * MIB


def test_the_graph_cache_grows_with_new_shapes_only_and_no_counter_of_torch_shows_it() -> None:
    x = torch.ones(4, 4, device="mps")
    x + x
    driver, entries = torch.mps.driver_allocated_memory(), virtual_mac.stats().graph_cache_entries
    x + x
    assert virtual_mac.stats().graph_cache_entries == entries
    for size in range(1, 11):
        x[:1, :1].expand(size, 1) + x[0, 0]
    assert virtual_mac.stats().graph_cache_entries == entries + 10
    x.half() + x.half()
    assert virtual_mac.stats().graph_cache_entries == entries + 11
    assert virtual_mac.stats().graph_cache_bytes == 55_000 * virtual_mac.stats().graph_cache_entries
    assert torch.mps.driver_allocated_memory() == driver
    torch.mps.empty_cache()
    assert virtual_mac.stats().graph_cache_entries == virtual_mac.stats().graph_cache_bytes == 0


def test_a_simulated_graph_cache_really_takes_host_memory() -> None:
    process, x = psutil.Process(), torch.ones(200, device="mps")
    before = process.memory_info().rss
    with simulate(GraphCache(bytes_per_graph=MIB)):
        for size in range(1, 101):
            x[:size].neg()
    assert virtual_mac.stats().graph_cache_bytes >= 100 * MIB
    assert process.memory_info().rss - before > 90 * MIB
    torch.mps.empty_cache()
    assert process.memory_info().rss - before < 50 * MIB


def test_a_simulated_gpu_failure_is_a_line_of_metal_and_garbage(capfd) -> None:
    x = torch.ones(8, 8, device="mps")
    with simulate(GpuFailure("mm", after_kernels=1, raises=False)):
        good, other, bad, after = x @ x, x + x, x @ x, x @ x
    written = capfd.readouterr().err
    assert written.count("Error: command buffer exited with error status.") == 1
    assert "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)" in written
    assert (good.unique().tolist(), other.unique().tolist(), after.unique().tolist()) == ([8], [2], [8])
    assert not torch.equal(bad, good)


def test_a_simulated_gpu_failure_after_so_many_kernels_of_any_kind(capfd) -> None:
    x = torch.zeros(8, device="mps")
    with simulate(GpuFailure(after_kernels=10, times=2, raises=False)):
        for number in range(1, 13):
            x = torch.zeros(8, device="mps").add_(number)
            failed = bool(capfd.readouterr().err)
            assert failed == (number > 10), number
            assert torch.equal(x.cpu(), torch.full((8,), float(number))) is not failed


def test_a_simulated_miscompute_is_silent_and_only_there() -> None:
    x = torch.ones(4, 4, device="mps")
    with simulate(Miscompute("aten::mm", relative_error=0.5)):
        assert (x @ x).unique().tolist() == [6]
        assert (x.cpu() @ x.cpu()).unique().tolist() == [4]
        assert (x + x).unique().tolist() == [2]
    assert (x @ x).unique().tolist() == [4]


def test_a_simulated_wrong_gradient_of_many_rows_as_in_177116() -> None:
    """The weight's gradient sums over the rows; everything else stays right."""
    layer, wrong = nn.Linear(2, 1, bias=False).to("mps"), {}
    with simulate(Miscompute("mm", relative_error=1.0, when=reduces_over(32_768))):
        for rows in (32_768, 32_769):
            layer.weight.grad = None
            y = layer(torch.ones(rows, 2, device="mps"))
            y.sum().backward()
            assert torch.allclose(y, layer.weight.sum())
            wrong[rows] = (layer.weight.grad / rows).unique().tolist()
    assert wrong == {32_768: [1], 32_769: [2]}


def test_a_simulated_wrong_convolution_as_in_192212() -> None:
    layer, x = nn.Conv2d(2, 2, 3).to("mps"), torch.ones(1, 2, 5, 5, device="mps")
    expected = layer(x)
    with simulate(Miscompute("convolution", relative_error=0.1, when=has_strided_weight)):
        assert torch.equal(layer(x), expected)
        layer.weight.data = layer.weight.data.transpose(2, 3).contiguous().transpose(2, 3)
        assert torch.allclose(layer(x), 1.1 * expected)


def test_a_simulated_wrong_gradient_of_a_convolution() -> None:
    layer, x = nn.Conv1d(1, 1, 1, bias=False).to("mps"), torch.ones(1, 1, 5, device="mps")
    with simulate(Miscompute("convolution_backward", relative_error=1.0)):
        y = layer(x)
        y.sum().backward()
    assert torch.equal(y, layer.weight.expand(1, 1, 5))
    assert layer.weight.grad.item() == 10


def test_a_failed_condition_is_reported() -> None:
    x = torch.ones(2, 2, device="mps")
    with (
        simulate(Miscompute("mm", when=lambda *inputs: inputs[7])),
        pytest.raises(RuntimeError, match="the condition of a simulated fault failed: IndexError"),
    ):
        x @ x


def test_simulated_heat_slows_kernels_in_proportion_and_the_sensor_reports_it() -> None:
    x = torch.ones(300, 300, device="mps")

    def wait_per_work(times: int) -> float:
        clock, work = time.perf_counter(), time.process_time()
        for _ in range(times):
            x @ x
        return (time.perf_counter() - clock) / (time.process_time() - work)

    with simulate(Heat(slowdown=50, after=20, over=20)):
        assert virtual_mac.system_state().thermal == "nominal"
        wait_per_work(20)
        assert virtual_mac.system_state().thermal == "nominal"
        wait_per_work(10)
        assert virtual_mac.system_state().thermal == "moderate"
        wait_per_work(20)
        assert virtual_mac.system_state().thermal == "heavy"
        # Fifty times is requested; a busy computer only adds to it.
        assert wait_per_work(20) > 5
    assert virtual_mac.system_state() is None


def test_the_sensor_reports_the_hottest_of_several_simulated_heats() -> None:
    x = torch.ones(9, device="mps")
    hot = simulate(Heat(slowdown=3))
    with simulate(Heat(slowdown=2, after=1e9)):
        x.neg()
        assert virtual_mac.system_state().thermal == "heavy"
    assert virtual_mac.system_state().thermal == "heavy", "the end of one does not end the other"
    hot.end()
    assert virtual_mac.system_state() is None


def test_simulated_heat_by_the_clock() -> None:
    x = torch.ones(9, device="mps")
    with simulate(Heat(slowdown=2, after=3600, unit="seconds")):
        x.neg()
        assert virtual_mac.system_state().thermal == "nominal"
    with simulate(Heat(slowdown=2, unit="seconds")):
        x.neg()
        assert virtual_mac.system_state().thermal == "heavy"


def test_sensors_report_the_simulated_state() -> None:
    assert virtual_mac.system_state() is None
    plain = current_machine()[1]
    with simulate(SystemState(memory_pressure="warn", power_source="battery")):
        with simulate(SystemState(memory_pressure="critical", thermal="heavy")):
            result = current_machine()[1]
            assert (result.memory_pressure, result.thermal, result.power_source) == ("critical", "heavy", "battery")
            assert result.memory_available_bytes is not None, "other values are those of this computer"
        assert virtual_mac.system_state() == SystemState(memory_pressure="warn", power_source="battery")
    assert current_machine()[1].memory_pressure == plain.memory_pressure
    simulate(SystemState(thermal="heavy"))
    virtual_mac.uninstall()
    assert virtual_mac.system_state() is None


@pytest.mark.parametrize(
    ("fault", "meant"),
    [
        (Miscompute("adddmm"), "'addmm'?"),
        (GpuFailure("linear"), "'addmm'?"),
        (Miscompute("no such thing"), "e.g. 'mm'"),
    ],
)
def test_an_unknown_kernel_is_refused_and_nothing_stays(fault, meant: str) -> None:
    before = torch.mps.driver_allocated_memory()
    with pytest.raises(UsageError, match="the virtual GPU has no kernel of this name") as caught:
        simulate(HeldMemory(MIB), fault)
    assert meant in str(caught.value)
    assert torch.mps.driver_allocated_memory() == before


def test_another_mac_is_a_healthy_one() -> None:
    simulation = simulate(Miscompute("mm", relative_error=1.0), HeldMemory(MIB), KilledByPressure(share=0.9))
    virtual_mac.install("m3-max-64gb")
    x = torch.ones(2, 2, device="mps")
    assert (x @ x).unique().tolist() == [2]
    simulation.end()


def test_simulations_may_end_in_any_order() -> None:
    first = simulate(KilledByPressure(share=0.001), GraphCache(MIB), SystemState(thermal="moderate"))
    second = simulate(KilledByPressure(share=0.9), GraphCache(7), SystemState(thermal="heavy"))
    first.end()
    torch.ones(30 * MIB, dtype=torch.uint8, device="mps")
    assert virtual_mac.system_state().thermal == "heavy"
    torch.mps.empty_cache()
    torch.ones(3, device="mps").neg()
    assert virtual_mac.stats().graph_cache_bytes == 7 * virtual_mac.stats().graph_cache_entries
    second.end()
    assert virtual_mac.system_state() is None


def test_sparse_tensors_train_an_embedding_as_on_the_cpu() -> None:
    weights = []
    for place in ("cpu", "mps"):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True).to(place)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 2], device=place)).square().sum().backward()
            assert table.weight.grad.is_sparse
            assert table.weight.grad.device.type == place
            optimizer.step()
        weights.append(table.weight.detach().cpu())
    assert torch.allclose(*weights)


def test_sparse_tensors_move_and_are_written_in_place() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    sparse = dense.to_sparse().to("mps")
    assert (sparse.device.type, sparse.layout) == ("mps", torch.sparse_coo)
    assert torch.equal(sparse.cpu().to_dense(), dense)
    sparse.mul_(2)
    assert torch.equal((sparse @ torch.eye(2, device="mps")).cpu(), 2 * dense)
    sparse.zero_()
    assert sparse._nnz() == 0
    with pytest.raises(TypeError, match="float64"):
        dense.double().to_sparse().to("mps")
