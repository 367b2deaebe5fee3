"""Plants known bugs of MPS in the virtual Mac (simulated), one at a time, runs the doctor's checks and prints JSON."""

import contextlib
import json
import os

import torch
from torch.nn import functional as f
from torch.overrides import TorchFunctionMode

from whet.device import virtual_mac

virtual_mac.install("m2-air-8gb")

from whet.device.mps import MpsDevice  # noqa: E402
from whet.device.open import open_device  # noqa: E402
from whet.doctor.check import DeviceUnderTest  # noqa: E402
from whet.doctor.runner import load_checks, run_check_safely  # noqa: E402

TABLES = ("operators:CHECKS", "hazards:CHECKS", "training:PARITY", "training:RESUME")
CHECKS = {check.name: check for table in TABLES for check in load_checks(f"whet.doctor.checks.{table}")}
ATTENTION = f.scaled_dot_product_attention


class Planted(TorchFunctionMode):
    """Puts another function in place of one, for tensors of the virtual Mac only."""

    def __init__(self, names, wrong) -> None:
        super().__init__()
        self.names, self.wrong = names, wrong

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.names and any(_is_there(a) for a in (*args, *kwargs.values())):
            return self.wrong(func, *args, **kwargs)
        return func(*args, **kwargs)


def _is_there(value) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_there(part) for part in value)
    return isinstance(value, torch.Tensor) and value.device.type == "mps"


def _reads_past_the_end(linear, x, weight, bias=None):
    if x.reshape(-1, x.shape[-1]).shape[0] > 32_768 and weight.requires_grad:
        weight = weight * 1
        weight.register_hook(lambda gradient: gradient * 1.01)
    return linear(x, weight, bias)


def _wraps_at_16_bits(linear, x, weight, bias=None):
    out = linear(x, weight, bias)
    if x.dim() == 3 and x.shape[0] > 65_536 and bias is not None:
        out = out.clone()
        out[: x.shape[0] - 65_536] = out[65_536:]
    return out


def _drops_the_bias(linear, x, weight, bias=None):
    return linear(x, weight, None if x.dim() == 1 else bias)


def _ignores_strides(conv, x, weight, *rest, **options):
    return conv(x, weight if weight.is_contiguous() else weight.flip(2), *rest, **options)


def _overwrites_its_source(to, x, *args, **options):
    out = to(x, *args, **options)
    if torch.float16 in args and x.storage_offset():
        x.zero_()
    return out


def _ignores_the_offset(multiply, x, y):
    return multiply(x, y.as_strided((), (), 0) if y.dim() == 0 and y.device.type == "cpu" else y)


def _clamps_the_variance(norm, x, *rest, **options):
    return norm(x * 1e3, *rest, **options) if float(x.var()) < 1e-6 else norm(x, *rest, **options)


def _leaks(_, q, k, v, is_causal=False, **options):
    if is_causal and q.dtype != torch.float32:
        # The mask is applied once for four rows.
        rows = torch.arange(q.shape[2], device=q.device)
        mask = torch.arange(k.shape[2], device=q.device) <= (rows // 4 * 4 + 3)[:, None]
        return ATTENTION(q, k, v, attn_mask=mask, **options)
    return ATTENTION(q, k, v, is_causal=is_causal, **options)


def _updates_nothing(update, x, *rest, **options):
    return update(x, *rest, **options) if x.is_contiguous() else x


def _steps_on_infinity(step, *args, found_inf=None, grad_scale=None, **options):
    return step(*args, found_inf=None, grad_scale=None, **options)


def _slightly_off(func, *args, **options):
    return func(*args, **options) * 1.001


def _sees_all(_, q, k, v, is_causal=False, **options):
    return ATTENTION(q, k, v, **options)


def _trembles(linear, *args):
    return linear(*args) * (1 + 1e-4 * torch.rand((), device="mps"))


def _wrong_gradient(func, x, *rest, **options):
    if x.requires_grad:
        x = x * 1
        x.register_hook(lambda gradient: gradient * 1.01)
    return func(x, *rest, **options)


class _UnrestorableGenerator:
    """The device's generator, whose state is never restored."""

    def __init__(self, generator) -> None:
        self._generator = generator

    def __getattr__(self, name):
        return getattr(self._generator, name)

    def set_state(self, _state) -> None:
        pass


@contextlib.contextmanager
def forgets_the_generator():
    own = MpsDevice.generator
    MpsDevice.generator = property(lambda device: _UnrestorableGenerator(own.fget(device)))
    try:
        yield
    finally:
        MpsDevice.generator = own


FAULTS = {
    "#177116 gradient of a linear layer over 40,000 rows": Planted(("linear",), _reads_past_the_end),
    "#189495 linear with bias and more than 65,536 matrices": Planted(("linear",), _wraps_at_16_bits),
    "#188438 bias of a linear layer for a single vector": Planted(("linear",), _drops_the_bias),
    "#192212 convolution with non-contiguous weights": Planted(("conv2d",), _ignores_strides),
    "#189563 a copy to the CPU in another dtype does not change its source": Planted(("to",), _overwrites_its_source),
    "#187117 a number from the middle of a CPU tensor": Planted(("mul",), _ignores_the_offset),
    "#190491 layer_norm of rows with little variance": Planted(("layer_norm",), _clamps_the_variance),
    "#195910 causal attention in half precision sees no future": Planted(("scaled_dot_product_attention",), _leaks),
    "#118115 addcdiv_ and addcmul_ on transposed weights (Adam)": Planted(("addcdiv_",), _updates_nothing),
    "#186360 a fused optimizer under a loss scaler: scaled right, and no step on infinity": Planted(
        ("_fused_sgd_",), _steps_on_infinity
    ),
    "gelu, silu, mish": Planted(("silu",), _slightly_off),
    "AdamW, fused": Planted(("_fused_adamw_",), lambda *_, **__: None),
    "transformer against the CPU": Planted(("scaled_dot_product_attention",), _sees_all),
    "convnet against the CPU": Planted(("conv2d",), _wrong_gradient),
    "transformer, the same step twice": Planted(("linear",), _trembles),
    "interrupted and resumed": forgets_the_generator(),
}


def main() -> None:
    place = DeviceUnderTest(device=open_device("mps").device, name="mps", is_virtual=True)
    result = {}
    for name, fault in FAULTS.items():
        without = run_check_safely(CHECKS[name], place)
        with fault:
            result[name] = {"without": without.verdict, "with": run_check_safely(CHECKS[name], place).verdict}
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
