"""`whet check` for releases of torch that are not installed, known faults by release, and code that needs CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flawed_models
from whet.api.verify import check
from whet.base.errors import UsageError
from whet.cli.check import render_text
from whet.device.operators import parse_release
from whet.machine.facts import Machine
from whet.machine.known import load_machine

pytestmark = pytest.mark.torch

Factory = Callable[[], flawed_models.Made]


def mac(torch_version: str, macos: str = "15.1") -> Machine:
    m2 = load_machine("m2-air-8gb")
    changed = {
        "torch": m2.torch.model_copy(update={"version": torch_version}),
        "os": m2.os.model_copy(update={"version": macos}),
    }
    return m2.model_copy(update=changed)


def found(factory: Factory, machine: Machine, **options: object) -> set[str]:
    # The machine's torch also decides which operators exist.
    version = machine.torch.version
    return {finding.id for finding in check(factory, machine=machine, torch=version, **options).findings}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "finding", "affected"),
    [
        ("ctc", "missing-operator", {"2.13"}),
        ("svd", "cpu-fall-back", {"2.13"}),
        ("uneven_pool", "adaptive-pool", {"2.13", "2.14", "2.15"}),
        ("float64_buffer", "float64", {"2.13", "2.14", "2.15"}),
    ],
)
def test_a_release_decides_what_is_missing(name: str, finding: str, affected: set[str]) -> None:
    for release in ("2.13", "2.14", "2.15"):
        actual = check(getattr(flawed_models, name), torch=release)
        assert actual.torch == release
        assert (finding in {each.id for each in actual.findings}) == (release in affected), release
        assert f"by torch {release}" in render_text(actual)[0]


def test_a_release_is_known_for_mps_only() -> None:
    other = "2.14" if parse_release(str(torch.__version__)) != (2, 14) else "2.15"
    with pytest.raises(UsageError, match="known for MPS only"):
        check(flawed_models.ctc, device="cuda", torch=other)
    with pytest.raises(UsageError, match="are not known"):
        check(flawed_models.ctc, torch="2.99")
    assert check(flawed_models.ctc, device="cpu", torch=str(torch.__version__)).findings == ()


def test_a_mac_that_is_too_old_for_a_release_is_refused() -> None:
    with pytest.raises(UsageError, match="m1-air-8gb has no MPS with this torch"):
        check(flawed_models.ctc, machine="m1-air-8gb", torch="2.15")


def test_a_machine_is_checked_for_the_torch_that_it_names() -> None:
    for release, is_missing in (("2.13", True), ("2.15", False)):
        actual = check(flawed_models.ctc, machine=f"m2-air-8gb,torch={release}")
        assert actual.torch == release
        assert ("missing-operator" in {finding.id for finding in actual.findings}) == is_missing


# --- known faults -----------------------------------------------------------------------------------------------------


def net(forward: Callable[..., Tensor], *inputs: Tensor, **layers: nn.Module) -> Factory:
    """Return a factory of a model with these layers and this forward."""

    class Model(flawed_models.Net):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, *values: Tensor) -> Tensor:
            return forward(self, *values) + self.inner.weight.sum()

    return lambda: (Model(), inputs)


def write_slice(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.zeros(2, 4, 4)
        torch.mm(x[:, :4], x[:, :4], out=out[1])
    return out.sum()


def attend_frozen(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return functional.scaled_dot_product_attention(x, x, x).sum()


INDICES = torch.randint(0, 9, (4, 600_000))
NEW_HAZARDS = {
    "amax-int64": (net(lambda m, i: i.amax(-1).float().mean(), INDICES), ("2.13.0",), ("2.12.0", "2.14.0")),
    "unique-counts": (
        net(lambda m, i: torch.unique(i, return_counts=True)[1].float().mean(), INDICES),
        ("2.13.0",),
        ("2.14.0",),
    ),
    "batch-norm-permuted": (
        net(lambda m, x: m.norm(x.permute(0, 3, 1, 2)).mean(), torch.randn(4, 5, 6, 8), norm=nn.BatchNorm2d(8)),
        ("2.13.0", "2.15.0"),
        (),
    ),
    "batch-norm-3d-abort": (
        net(lambda m, x: m.norm(x.movedim(-1, 1)).mean(), torch.randn(4, 3, 5, 6, 8), norm=nn.BatchNorm3d(8)),
        ("2.13.0", "2.15.0"),
        (),
    ),
    "lstm-permuted": (
        net(lambda m, x: m.rnn(x.transpose(0, 1))[0].mean(), torch.randn(4, 5, 8), rnn=nn.LSTM(8, 8)),
        ("2.13.0", "2.15.0"),
        (),
    ),
    "linear-5d": (
        net(lambda m, x: m.inner(x).mean(), torch.randn(4, 1, 2, 1, 8)),
        ("2.13.0 on 27.0", "2.15.0 on 27.0"),
        ("2.15.0 on 26.1",),
    ),
    "product-out-slice": (net(write_slice, torch.randn(4, 8)), ("2.13.0 on 14.6",), ("2.13.0 on 15.0",)),
    "attention-hides-nan": (net(attend_frozen, torch.randn(4, 2, 6, 8)), ("2.13.0",), ("2.14.0",)),
    "pinned-recycled": (
        net(lambda m, x: x.detach().pin_memory().sum(), torch.randn(4, 8)),
        ("2.14.0",),
        ("2.13.0", "2.15.0"),
    ),
}


@pytest.mark.parametrize("name", NEW_HAZARDS)
def test_a_known_fault_is_found_only_where_it_applies(name: str) -> None:
    factory, affected, cured = NEW_HAZARDS[name]
    for where in affected:
        assert f"known-fault/{name}" in found(factory, mac(*where.split(" on "))), where
    for where in cured:
        assert f"known-fault/{name}" not in found(factory, mac(*where.split(" on "))), where


def test_contiguous_inputs_have_no_fault() -> None:
    for layer, x in ((nn.BatchNorm2d(8), torch.randn(4, 8, 5, 6)), (nn.BatchNorm3d(8), torch.randn(4, 8, 3, 5, 6))):
        assert not found(net(lambda m, x: m.norm(x).mean(), x, norm=layer), mac("2.13.0"))
    assert not found(net(lambda m, x: m.rnn(x)[0].mean(), torch.randn(4, 5, 8), rnn=nn.LSTM(8, 8)), mac("2.13.0"))
    assert not found(net(lambda m, i: i.int().amax(-1).float().mean(), INDICES), mac("2.13.0"))


@contextmanager
def vision_operator(name: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """Define an operator in torchvision's name space, for a torchvision that is not installed."""
    library = torch.library.Library("torchvision", "DEF")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    try:
        yield getattr(torch.ops.torchvision, name)
    finally:
        library._destroy()


@pytest.mark.parametrize(("name", "is_cured"), [("roi_align", True), ("roi_pool", False)])
def test_gradients_of_boxes_in_torchvision_are_a_known_fault(name: str, is_cured: bool) -> None:
    with vision_operator(name) as operator:
        factory = net(lambda m, x: operator(x).mean(), torch.randn(4, 8))
        fault = f"known-fault/{name.replace('_', '-')}-backward"
        assert fault in found(factory, mac("2.13.0"))
        assert (fault in found(factory, mac("2.14.0"))) is not is_cured


# --- code that needs CUDA ---------------------------------------------------------------------------------------------


def cuda_model() -> flawed_models.Made:
    class Model(flawed_models.Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8, device="cuda"))

        def forward(self, x: Tensor) -> Tensor:
            x = x.cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = self.inner(x)
            torch.cuda.synchronize()
            with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
                return y.to("cuda:0") * self.scale

    return Model().cuda(), (torch.randn(4, 8),)


def test_code_that_needs_cuda_is_found_on_its_lines() -> None:
    actual = check(cuda_model)
    assert actual.is_fake
    assert {finding.id for finding in actual.findings} == {"cuda-only"}
    lines = {(finding.severity, finding.place.code) for finding in actual.findings if finding.place}
    assert lines == {
        ("error", 'self.register_buffer("scale", torch.ones(8, device="cuda"))'),
        ("error", "return Model().cuda(), (torch.randn(4, 8),)"),
        ("error", "x = x.cuda()"),
        ("error", "torch.cuda.synchronize()"),
        ("error", 'return y.to("cuda:0") * self.scale'),
        ("warning", 'with torch.autocast("cuda", dtype=torch.bfloat16):'),
    }
    [autocast] = [finding for finding in actual.findings if finding.severity == "warning"]
    assert "no effect on mps" in autocast.what
    assert "precision=bf16" in autocast.try_


def test_a_scaler_for_cuda_is_found() -> None:
    def scale(model: nn.Module, x: Tensor) -> Tensor:
        torch.amp.GradScaler("cuda")
        return x.mean()

    [finding] = check(net(scale, torch.randn(4, 8))).findings
    assert "nothing scales the loss" in finding.what


def test_the_check_restores_what_it_replaces() -> None:
    before = torch.autocast.__init__, torch.nn.Module.cuda, torch.nn.Module.to, torch.cuda.synchronize
    check(flawed_models.ctc)
    assert before == (torch.autocast.__init__, torch.nn.Module.cuda, torch.nn.Module.to, torch.cuda.synchronize)
