"""Checks that run on a virtual m2-air-8gb; test_virtual_device.py starts them with `pytest --virtual-mac`."""

import dataclasses
import gc
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from whet.base.errors import UsageError
from whet.device import virtual_mac
from whet.device.errors import is_out_of_memory
from whet.device.open import current_machine, open_device
from whet.machine.known import load_machine

GIB = 2**30


@pytest.fixture(autouse=True)
def _counts_from_zero():
    gc.collect()
    torch.mps.empty_cache()
    virtual_mac.reset_stats()
    yield
    virtual_mac.hold_memory(0)
    virtual_mac.install("m2-air-8gb")


def test_torch_accepts_the_device_and_its_name_says_virtual() -> None:
    assert torch.backends.mps.is_built()
    assert torch.backends.mps.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.mps.device_count() == 1
    assert torch.mps.recommended_max_memory() == 5_726_633_984
    assert torch.backends.mps.get_name() == "Apple M2 (virtual)"
    assert torch.backends.mps.get_core_count() == 10
    assert torch.backends.mps.is_macos_or_newer(15, 1)
    assert not torch.backends.mps.is_macos_or_newer(26, 0)
    assert torch.ones(2, device="mps").device == torch.device("mps:0")


def test_the_machine_here_is_the_virtual_one() -> None:
    machine, _ = current_machine()
    assert machine.name == "m2-air-8gb (virtual)"
    assert "not a Mac" in machine.sources[-1]
    assert machine.accelerator("mps") == load_machine("m2-air-8gb").accelerator("mps")
    assert machine.torch.version == torch.__version__
    assert open_device("auto").device.kind == "mps"


def test_memory_runs_out_at_the_watermark_with_the_text_of_mps() -> None:
    open_device("mps")
    held = []
    with pytest.raises(RuntimeError) as caught:
        held.extend(torch.empty(GIB // 2, dtype=torch.uint8, device="mps") for _ in range(100))
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == (
        "MPS backend out of memory (MPS allocated: 9.00 GiB, other allocations: 0 bytes, max allowed: 9.07 GiB). "
        "Tried to allocate 512.00 MiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit "
        "for memory allocations (may cause system failure)."
    )
    assert is_out_of_memory(caught.value)
    assert len(held) == 18
    assert torch.accelerator.max_memory_allocated() == virtual_mac.stats().peak == 9 * GIB
    del held[9:]
    # Unused memory is released before an out-of-memory error is raised.
    torch.empty(GIB, dtype=torch.uint8, device="mps")


def test_memory_held_by_others_counts() -> None:
    virtual_mac.hold_memory(9 * GIB)
    with pytest.raises(RuntimeError, match=r"other allocations: 9.00 GiB"):
        torch.empty(GIB, dtype=torch.uint8, device="mps")
    assert torch.mps.driver_allocated_memory() >= 9 * GIB


def test_a_fraction_of_the_memory_may_be_set() -> None:
    torch.mps.set_per_process_memory_fraction(0.5)
    with pytest.raises(RuntimeError, match=r"max allowed: 2.67 GiB"):
        torch.empty(3 * GIB, dtype=torch.uint8, device="mps")
    with pytest.raises(RuntimeError, match="invalid high watermark ratio 3"):
        torch._C._mps_setMemoryFraction(3.0)
    torch.mps.set_per_process_memory_fraction(1.7)


def test_heaps_are_reserved_as_metal_does() -> None:
    before = torch.mps.driver_allocated_memory()
    tensor = torch.empty(20 * 2**20, dtype=torch.uint8, device="mps")
    assert torch.mps.driver_allocated_memory() - before == GIB
    assert torch.mps.current_allocated_memory() >= tensor.nbytes
    del tensor
    assert torch.mps.driver_allocated_memory() - before == GIB
    torch.mps.empty_cache()
    assert torch.mps.driver_allocated_memory() == before


FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="mps").double(),
        lambda: torch.ones(2, dtype=torch.float64).to("mps"),
        lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
        lambda: nn.Linear(2, 2).double().to("mps"),
    ],
)
def test_float64_is_refused_with_the_text_of_mps(make) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == FLOAT64


def test_a_missing_operator_is_named_with_the_text_of_mps() -> None:
    with pytest.raises(NotImplementedError) as caught:
        torch.pdist(torch.eye(3, device="mps"))
    text = str(caught.value)
    assert text.startswith(
        "The operator 'aten::_pdist_forward' is not currently implemented for the MPS device. If you want "
    )
    assert "`PYTORCH_ENABLE_MPS_FALLBACK=1`" in text
    assert not virtual_mac.stats().fallbacks


def test_svd_runs_on_the_cpu_and_is_counted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.linalg.svd(torch.eye(3, device="mps"))[1]
    assert values.tolist() == [1, 1, 1]
    (name, cost), *others = virtual_mac.stats().fallbacks.items()
    assert (name, cost.calls, others) == ("linalg_svd", 1, [])
    assert 0 < cost.seconds < 10


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8, device="mps"), "Invalid buffer size: "),
        (lambda: torch.ones([1] * 17, device="mps"), "MPS supports tensors with dimensions <= 16, but got 17."),
        (lambda: torch.ones(2, 2, device="mps") @ torch.ones(2, 2), "Expected all tensors to be on the same device"),
        (lambda: functional.adaptive_avg_pool2d(torch.ones(1, 1, 7, 7, device="mps"), 3), "Adaptive pool MPS: "),
        # Not a gap of the simulation: torch itself asks for indices on the CPU.
        (lambda: torch.ones(6, device="mps").tensor_split(torch.ones(1, dtype=torch.long, device="mps")), "tensor_sp"),
        (lambda: torch.eye(3, device="mps").to_sparse_csr(), "The operator 'aten::_to_sparse_csr' is not "),
        (lambda: torch.mps.set_rng_state(torch.get_rng_state()), "RNG state is wrong size"),
    ],
)
def test_limits_are_reported(refused, text: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        refused()
    assert str(caught.value).startswith(text)


def test_sums_in_a_varying_order_are_refused_where_determinism_is_asked_for() -> None:
    index = torch.tensor([0, 0, 1], device="mps")
    # The backward pass of indexing adds too.
    learned = torch.ones(2, device="mps", requires_grad=True)
    refused = (
        lambda: torch.zeros(2, device="mps").index_put_((index,), torch.ones(3, device="mps"), accumulate=True),
        lambda: torch.zeros(2, device="mps").index_add(0, index, torch.ones(3, device="mps")),
        lambda: torch.zeros(2, device="mps").scatter_add_(0, index, torch.ones(3, device="mps")),
        lambda: torch.zeros(2, device="mps").scatter_reduce(0, index, torch.ones(3, device="mps"), "sum"),
        lambda: learned[index].sum().backward(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        for call in refused:
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                call()
        integers = torch.zeros(2, dtype=torch.int32, device="mps").scatter_add_(0, index, torch.ones_like(index).int())
        assert integers.tolist() == [2, 1]
        assert torch.zeros(2, device="mps").index_put_((index,), torch.ones(3, device="mps")).tolist() == [1, 1]
        largest = torch.zeros(2, device="mps").scatter_reduce(0, index, torch.ones(3, device="mps"), "amax")
        assert largest.tolist() == [1, 1]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.zeros(2, device="mps").index_add(0, index, torch.ones(3, device="mps")).tolist() == [2, 1]


def test_a_view_of_a_part_refers_to_the_whole_tensor() -> None:
    whole = torch.arange(10.0, device="mps")
    assert whole[4:].as_strided((3,), (2,), 1).tolist() == [1, 3, 5]


def test_the_generator_is_the_devices_own() -> None:
    torch.manual_seed(5)
    cpu, state = torch.get_rng_state(), torch.mps.get_rng_state()
    assert state.shape == (44,)

    def draw() -> list[torch.Tensor]:
        ones = torch.ones(100, device="mps")
        drawn = [torch.rand(100, device="mps"), torch.randn(100, device="mps"), torch.randperm(100, device="mps")]
        drawn += [functional.dropout(ones), torch.native_dropout(ones, 0.5, True)[0], torch.bernoulli(ones / 2)]
        return [tensor.cpu() for tensor in drawn]

    first, second = draw(), draw()
    torch.mps.set_rng_state(state)
    third = draw()
    for a, b, c in zip(first, second, third, strict=True):
        assert not torch.equal(a, b)
        assert torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), cpu), "nothing was drawn from the CPU's generator"
    torch.manual_seed(5)
    assert torch.equal(torch.mps.get_rng_state(), state)


def test_generators_can_be_made_and_copied() -> None:
    one, other = (torch.Generator("mps").manual_seed(3) for _ in range(2))
    assert torch.equal(torch.rand(9, device="mps", generator=one), torch.rand(9, device="mps", generator=other))
    other.set_state(one.get_state())
    assert torch.equal(torch.rand(9, device="mps", generator=one), torch.rand(9, device="mps", generator=other))
    assert abs(float(torch.rand(100_000, device="mps").mean()) - 0.5) < 0.01


def test_events_measure_time() -> None:
    start, end = (torch.mps.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert end.query()
    assert 20 <= start.elapsed_time(end) < 10_000, "milliseconds"


def test_waits_are_counted() -> None:
    tensor = torch.ones(3, device="mps")
    before = virtual_mac.stats().num_syncs
    tensor.sum()
    assert virtual_mac.stats().num_syncs == before
    tensor.sum().item()
    tensor.cpu()
    torch.mps.synchronize()
    torch.accelerator.synchronize()
    assert virtual_mac.stats().num_syncs == before + 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        virtual_mac.stats().num_syncs = 0


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_and_loss_scaling(half: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("mps")
    x = torch.randn(4, 8, device="mps")
    with torch.autocast("mps", dtype=half):
        y = model(x)
    assert y.dtype == half
    before = model[0].weight.detach().clone()
    (scaler.scale(y.float().sum()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, before), "a step with infinite gradients is left out"
    assert scaler.get_scale() == 2**15


def _block() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 50))


def test_a_transformer_trains_as_on_the_cpu() -> None:
    curves = []
    tokens = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(0))
    for place in ("cpu", "mps"):
        torch.manual_seed(0)
        model, x = _block().to(place), tokens.to(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        curves.append([])
        for _ in range(10):
            loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curves[-1].append(loss.item())
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    assert curves[1][-1] < curves[1][0]


def test_states_are_saved_and_loaded(tmp_path) -> None:
    torch.save({"w": torch.arange(3.0, device="mps")}, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt")["w"].device.type == "mps"
    assert torch.load(tmp_path / "state.pt", map_location="cpu")["w"].tolist() == [0, 1, 2]


def test_another_mac_and_none() -> None:
    assert virtual_mac.install("m2-air-8gb") == virtual_mac.installed()
    virtual_mac.install("m3-max-64gb")
    assert torch.mps.recommended_max_memory() == load_machine("m3-max-64gb").accelerator("mps").usable_bytes
    tensor = torch.ones(3, device="mps")
    virtual_mac.uninstall()
    assert virtual_mac.installed() is None
    assert not torch.backends.mps.is_available()
    assert not torch.accelerator.is_available()
    assert current_machine()[0].accelerator("mps") is None
    assert tensor.tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="h200 has no Apple GPU"):
        virtual_mac.install("h200")
