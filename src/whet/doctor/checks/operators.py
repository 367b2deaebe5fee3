"""Checks of operators, layers, optimizers and loss scaling against the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.optim import Optimizer

from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, differs, good, not_applicable
from whet.doctor.checks.compare import (
    compare_results,
    compare_with_cpu,
    draw,
    draw_integers,
    forward_and_backward,
    layer,
    operator,
)
from whet.verify.tolerance import HALF_TOLERANCES

# --- Layers ----------------------------------------------------------------------------------------------------------

_HEADS = [draw(2, 3, 12, 16, seed=seed) for seed in range(3)]
_ATTENTION_MASK = draw(2, 1, 12, 12).abs() > 0.3


class _Recurrent(nn.Module):
    """A recurrent layer that returns only its outputs."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], **options: bool) -> None:
        super().__init__()
        self.inner = kind(6, 8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def _dropout(target: DeviceUnderTest) -> CheckFinding:
    """Check the dropped fraction, the scale and the gradient, because the mask differs between devices."""
    torch.manual_seed(0)
    x = target.put(torch.ones(200, 500)).requires_grad_()
    y = f.dropout(x, 0.3)
    y.sum().backward()
    assert x.grad is not None
    kept, gradient = y.detach().cpu(), x.grad.cpu()
    share = float((kept == 0).float().mean())
    is_scaled = bool(((kept - 1 / 0.7).abs() < 1e-4).logical_or(kept == 0).all())
    if abs(share - 0.3) < 0.01 and is_scaled and torch.allclose(kept, gradient):
        return good("the share, the scale and the gradient are right", share=share)
    return differs("the dropped share, the scale or the gradient is wrong", share=share)


def _autocast(dtype: torch.dtype, target: DeviceUnderTest) -> CheckFinding:
    """Compare linear, attention, conv1d and layer_norm under autocast with float32 on the CPU."""

    def compute(x: Tensor, weight: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        rows = f.linear(x, weight)
        heads = rows.view(2, 12, 3, 16).transpose(1, 2)
        attended = f.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return rows.float(), attended.float(), f.conv1d(rows, kernel).float(), f.layer_norm(rows, (48,)).float()

    def halved(*inputs: Tensor) -> tuple[Tensor, ...]:
        with target.device.autocast("fp16" if dtype == torch.float16 else "bf16"):
            return compute(*inputs)

    inputs = (draw(2, 12, 32), draw(48, 32, seed=1) / 6, draw(5, 12, 3, seed=2) / 6)
    expected = forward_and_backward(compute, inputs, torch.device("cpu"))
    result = forward_and_backward(halved, inputs, target.torch_device)
    return compare_results(
        result, expected, tolerance=4 * HALF_TOLERANCES[dtype], right="close to float32", wrong="far from float32"
    )


LAYERS: list[Check] = [
    layer("Conv1d", lambda: nn.Conv1d(3, 5, 3, padding=1), draw(2, 3, 20)),
    layer("Conv2d", lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1), draw(2, 3, 12, 12), is_quick=True),
    layer("Conv2d, grouped and dilated", lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), draw(2, 4, 12, 12)),
    layer("Conv3d", lambda: nn.Conv3d(2, 3, 3), draw(1, 2, 6, 6, 6)),
    layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), draw(2, 3, 6, 6)),
    operator("channels_last convolution", lambda x, w: f.conv2d(x.to(memory_format=torch.channels_last), w),
             draw(2, 3, 9, 9), draw(4, 3, 3, 3, seed=1)),
    layer("BatchNorm2d", lambda: nn.BatchNorm2d(3), draw(4, 3, 6, 6)),
    layer("BatchNorm2d, eval", lambda: nn.BatchNorm2d(3).eval(), draw(4, 3, 6, 6)),
    layer("GroupNorm", lambda: nn.GroupNorm(2, 6), draw(4, 6, 5, 5)),
    layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(3, affine=True), draw(4, 3, 6, 6)),
    layer("LayerNorm", lambda: nn.LayerNorm(48), draw(4, 9, 48), is_quick=True),
    layer("RMSNorm", lambda: nn.RMSNorm(48), draw(4, 9, 48)),
    layer("MaxPool2d, AvgPool2d", lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2)), draw(2, 3, 12, 12)),
    layer("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(3), draw(2, 3, 12, 12)),
    operator("interpolate, nearest", lambda x: f.interpolate(x, scale_factor=2.0), draw(1, 2, 5, 5)),
    operator("interpolate, bilinear", lambda x: f.interpolate(x, size=(9, 9), mode="bilinear"), draw(1, 2, 5, 5)),
    operator("interpolate, bicubic", lambda x: f.interpolate(x, size=(9, 9), mode="bicubic"), draw(1, 2, 5, 5)),
    operator("grid_sample", lambda x, g: f.grid_sample(x, g.tanh(), align_corners=False), draw(1, 2, 5, 5),
             draw(1, 4, 4, 2, seed=1)),
    operator("unfold, fold", lambda x: f.fold(f.unfold(x, 3, padding=1), (6, 6), 3, padding=1), draw(1, 2, 6, 6)),
    operator("pixel_shuffle", lambda x: f.pixel_shuffle(x, 2), draw(1, 8, 4, 4)),
    operator("attention", f.scaled_dot_product_attention, *_HEADS, is_quick=True),
    operator("attention, causal", lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True), *_HEADS,
             is_quick=True),
    operator("attention, masked", lambda q, k, v, m: f.scaled_dot_product_attention(q, k, v, attn_mask=m), *_HEADS,
             _ATTENTION_MASK),
    layer("MultiheadAttention", _SelfAttention, draw(2, 9, 16)),
    layer("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
          draw(2, 9, 16)),
    layer("LSTM", lambda: _Recurrent(nn.LSTM), draw(3, 7, 6)),
    layer("LSTM, both ways", lambda: _Recurrent(nn.LSTM, bidirectional=True), draw(3, 7, 6)),
    layer("GRU", lambda: _Recurrent(nn.GRU), draw(3, 7, 6)),
    layer("Embedding", lambda: nn.Embedding(20, 8, padding_idx=0), draw_integers(4, 9, below=20)),
    layer("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), draw(5, 6)),
    Check(name="Dropout", run=_dropout, is_quick=True),
    Check(name="autocast fp16", run=lambda target: _autocast(torch.float16, target)),
    Check(name="autocast bf16", run=lambda target: _autocast(torch.bfloat16, target)),
]  # fmt: skip


# --- After the backward pass: optimizers, clipping, averages, loss scaling -------------------------------------------

_STEPS = 4
MakeOptimizer = Callable[[Any], Optimizer]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def _weights_after(make: MakeOptimizer, where: torch.device) -> list[torch.Tensor]:
    """Return the weights after a few steps with fixed gradients, which isolate the optimizer."""
    model = _net().to(where)
    optimizer = make(model.parameters())
    for step in range(_STEPS):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = draw(*parameter.shape, seed=10 * step + index).to(where)
        optimizer.step()
    return list(model.parameters())


def _clip(where: torch.device) -> Any:
    model = _net().to(where)
    model(draw(9, 8).to(where)).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return norm, [p.grad for p in model.parameters()]


def _ema(where: torch.device) -> Any:
    averages = [draw(8, 16).to(where), draw(16, seed=1).to(where)]
    torch._foreach_lerp_(averages, [draw(8, 16, seed=2).to(where), draw(16, seed=3).to(where)], 0.1)
    return averages


def _scaled(where: torch.device) -> Any:
    """Return the weights after two steps with a loss scale, which must not change the result."""
    model = _net().to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(where.type, init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(draw(9, 8).to(where)).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


def _optimizer(name: str, make: MakeOptimizer, *, is_quick: bool = False) -> Check:
    return Check(name=name, run=partial(compare_with_cpu, partial(_weights_after, make)), is_quick=is_quick)


UPDATES: list[Check] = [
    _optimizer("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)),
    _optimizer("AdamW, foreach", lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True)),
    _optimizer("AdamW, fused", lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), is_quick=True),
    _optimizer("Adam, fused and amsgrad", lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True)),
    _optimizer("SGD, momentum", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    _optimizer("SGD, fused", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True)),
    _optimizer("Adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    _optimizer("RMSprop", lambda p: torch.optim.RMSprop(p, lr=1e-2)),
    Check(name="clip_grad_norm", run=partial(compare_with_cpu, _clip), is_quick=True),
    Check(name="average of weights (lerp)", run=partial(compare_with_cpu, _ema)),
    Check(name="GradScaler", run=partial(compare_with_cpu, _scaled)),
]


# --- Functions -------------------------------------------------------------------------------------------------------

_MASK = draw(4, 6) > 0
_ROWS = torch.tensor([3, 0, 3, 1])
_WHERE = draw_integers(4, 6, below=4)

_ALGEBRA = [
    operator("matmul", torch.matmul, draw(33, 64), draw(64, 17, seed=1), is_quick=True),
    operator("matmul, batched", torch.matmul, draw(3, 5, 16), draw(3, 16, 7, seed=1)),
    operator("matmul, transposed", lambda a, b: a.t() @ b.t(), draw(16, 9), draw(5, 16, seed=1)),
    operator("addmm", torch.addmm, draw(5), draw(4, 8), draw(8, 5, seed=1)),
    operator("baddbmm", torch.baddbmm, draw(2, 4, 5), draw(2, 4, 8), draw(2, 8, 5, seed=1)),
    operator("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), draw(2, 4, 8), draw(2, 5, 8, seed=1)),
    operator("outer, dot", lambda a, b: (torch.outer(a, b), torch.dot(a, b)), draw(9), draw(9, seed=1)),
    operator("linear", f.linear, draw(2, 7, 12), draw(5, 12, seed=1), draw(5, seed=2), is_quick=True),
    operator("bilinear", f.bilinear, draw(6, 4), draw(6, 5, seed=1), draw(3, 4, 5, seed=2), draw(3, seed=3)),
    operator("cdist", torch.cdist, draw(6, 4), draw(7, 4, seed=1), tolerance=1e-3),
]
_POINTWISE = [
    operator("add, mul, div", lambda a, b: (a + b, a * b, a / (b.abs() + 1)), draw(4, 6), draw(6, seed=1)),
    operator("exp, log", lambda a: (a.exp(), (a.abs() + 0.1).log(), a.expm1(), a.abs().log1p()), draw(4, 6)),
    operator("pow, sqrt, rsqrt", lambda a: (a.pow(3), (a.abs() + 1).sqrt(), (a.abs() + 1).rsqrt()), draw(4, 6)),
    operator("sin, cos, atan2", lambda a, b: (a.sin(), a.cos(), torch.atan2(a, b)), draw(4, 6), draw(4, 6, seed=1)),
    operator("erf, sigmoid, tanh", lambda a: (a.erf(), a.sigmoid(), a.tanh(), a.logit(1e-3)), draw(4, 6).sigmoid()),
    operator("abs, sign, clamp", lambda a: (a.abs(), a.sign(), a.clamp(-0.5, 0.5)), draw(4, 6)),
    operator("floor, round, remainder", lambda a: (a.floor(), a.round(), a.remainder(0.7)), draw(4, 6)),
    operator("lerp, addcmul, addcdiv", lambda a, b: (a.lerp(b, 0.3), torch.addcmul(a, a, b, value=0.5),
             torch.addcdiv(a, b, b.abs() + 1)), draw(4, 6), draw(4, 6, seed=1)),
    operator("maximum, minimum", lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)), draw(4, 6),
             draw(4, 6, seed=1)),
    operator("relu, leaky_relu, elu", lambda a: (f.relu(a), f.leaky_relu(a), f.elu(a)), draw(4, 6)),
    operator("gelu, silu, mish", lambda a: (f.gelu(a), f.gelu(a, approximate="tanh"), f.silu(a), f.mish(a)),
             draw(40, 6), is_quick=True),
    operator("softplus, hardswish, glu", lambda a: (f.softplus(a), f.hardswish(a), f.glu(a)), draw(4, 6)),
    operator("softmax, log_softmax", lambda a: (a.softmax(-1), a.log_softmax(0)), draw(16, 50), is_quick=True),
    operator("logsumexp", lambda a: a.logsumexp(-1), draw(4, 6)),
    operator("nan_to_num, isfinite", lambda a: (a.nan_to_num(), a.isfinite()),
             torch.tensor([1.0, torch.inf, torch.nan])),
]  # fmt: skip
_REDUCTIONS = [
    operator("sum, mean", lambda a: (a.sum(), a.sum(-1), a.mean(0)), draw(40, 60), is_quick=True),
    operator("var, std", lambda a: (a.var(-1), a.std(), a.var(0, correction=0)), draw(40, 60)),
    operator("norm", lambda a: (a.norm(), torch.linalg.vector_norm(a, dim=-1)), draw(40, 60)),
    operator("amax, max with indices", lambda a: (a.amax(-1), *a.max(0), a.argmin(-1)), draw(40, 60)),
    operator("prod, all, any", lambda a: (a.prod(-1), (a > 0).all(), (a > 0).any(0)), draw(4, 6)),
    operator("cumsum, cumprod", lambda a: (a.cumsum(-1), a.cumprod(0)), draw(8, 50)),
    operator("sort", lambda a: a.sort(-1), draw(8, 50)),
    operator("argsort", lambda a: a.argsort(-1, descending=True), draw(8, 50)),
    operator("topk", lambda a: a.topk(5), draw(8, 50)),
    operator("median", lambda a: a.median(-1), draw(8, 51)),
    operator("unique", lambda a: a.unique(return_counts=True), draw_integers(60, below=9)),
    operator("bincount, histc", lambda a: a.bincount(minlength=12), draw_integers(60, below=9)),
    operator("searchsorted, bucketize", lambda a, b: (torch.searchsorted(a, b), torch.bucketize(b, a)),
             draw(20).sort().values, draw(4, 6, seed=1)),
]  # fmt: skip
_INDEXING = [
    operator("index by a tensor", lambda a, i: a[i], draw(4, 6), _ROWS, is_quick=True),
    operator("index by a mask", lambda a, m: a[m], draw(4, 6), _MASK),
    operator("index_put, accumulated", lambda a, b, i: a.clone().index_put_((i,), b, accumulate=True), draw(5, 6),
             draw(4, 6, seed=1), _ROWS),
    operator("index_add", lambda a, b, i: a.clone().index_add_(0, i, b), draw(5, 6),
             draw(4, 6, seed=1), _ROWS),
    operator("index_select", lambda a, i: a.index_select(0, i), draw(5, 6), _ROWS),
    operator("gather", lambda a, i: a.gather(0, i), draw(4, 6), _WHERE),
    operator("scatter_add", lambda a, b, i: a.clone().scatter_add_(0, i, b), draw(4, 6), draw(4, 6, seed=1), _WHERE),
    operator("scatter_reduce", lambda a, b, i: a.scatter_reduce(0, i, b, reduce="mean"), draw(4, 6),
             draw(4, 6, seed=1), _WHERE),
    operator("masked_fill, where", lambda a, m: (a.masked_fill(m, 2.0), torch.where(m, a, a * 2)), draw(4, 6), _MASK),
    operator("cat, stack, split", lambda a, b: (torch.cat((a, b)), torch.stack((a, b)), *a.split(2)), draw(4, 6),
             draw(4, 6, seed=1)),
    operator("roll, flip, repeat", lambda a: (a.roll(2, -1), a.flip(0), a.repeat(2, 3)), draw(4, 6)),
    operator("repeat_interleave", lambda a: a.repeat_interleave(3, 0), draw(4, 6)),
    operator("tril, triu", lambda a: (a.tril(), a.triu(1)), draw(6, 6)),
    operator("pad", lambda a: (f.pad(a, (1, 2)), f.pad(a, (1, 1, 2, 0), mode="reflect")), draw(1, 2, 6, 6)),
    operator("one_hot, nonzero", lambda i: (f.one_hot(i, 5), i.nonzero()), _ROWS),
    operator("fft", lambda a: torch.fft.rfft(a).abs(), draw(4, 64)),
    operator("embedding", f.embedding, draw_integers(4, 9, below=20), draw(20, 8), is_quick=True),
    operator("embedding_bag", lambda i, w: f.embedding_bag(i, w), draw_integers(4, 9, below=20), draw(20, 8)),
]  # fmt: skip
_LOSSES = [
    operator("cross_entropy", f.cross_entropy, draw(16, 50), draw_integers(16, below=50), is_quick=True),
    operator("cross_entropy, smoothed and ignored", lambda a, i: f.cross_entropy(a, i, label_smoothing=0.1,
             ignore_index=3), draw(64, 9), draw_integers(64, below=9)),
    operator("nll_loss, 2-d", lambda a, i: f.nll_loss(a.log_softmax(1), i), draw(3, 5, 4, 4),
             draw_integers(3, 4, 4, below=5)),
    operator("mse, l1, huber", lambda a, b: (f.mse_loss(a, b), f.l1_loss(a, b), f.huber_loss(a, b)), draw(9),
             draw(9, seed=1)),
    operator("binary_cross_entropy", lambda a, b: (f.binary_cross_entropy_with_logits(a, b), f.binary_cross_entropy(
             a.sigmoid(), b)), draw(4, 6), draw(4, 6, seed=1).sigmoid()),
    operator("kl_div, cosine", lambda a, b: (f.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
             f.cosine_similarity(a, b)), draw(4, 6), draw(4, 6, seed=1)),
]  # fmt: skip
# torch 2.13 has no MPS kernels for these operators. A newer version may have some.
_LACKING = [
    operator("ctc_loss", lambda a: f.ctc_loss(a.log_softmax(-1), torch.ones(2, 3, dtype=torch.long, device=a.device),
             torch.tensor([8, 8]), torch.tensor([3, 3])), draw(8, 2, 5)),
    operator("linalg.eigh", lambda a: torch.linalg.eigvalsh(a + a.mT), draw(6, 6)),
    operator("linalg.svd", lambda a: torch.linalg.svdvals(a), draw(6, 4)),
    operator("linalg.lstsq", lambda a, b: torch.linalg.lstsq(a, b).solution, draw(6, 4), draw(6, 2, seed=1),
             tolerance=1e-3),
    operator("matrix_exp", lambda a: torch.linalg.matrix_exp(a), draw(4, 4)),
    operator("pdist", f.pdist, draw(6, 4)),
    operator("adaptive_avg_pool3d", lambda a: f.adaptive_avg_pool3d(a, 2), draw(1, 2, 4, 4, 4)),
    operator("multi_margin_loss", f.multi_margin_loss, draw(6, 5), draw_integers(6, below=5)),
    operator("take", lambda a, i: a.take(i), draw(4, 6), _ROWS),
    operator("mode", lambda a: a.mode(-1).values, draw_integers(4, 9, below=3)),
    operator("heaviside", lambda a, b: torch.heaviside(a.detach(), b.detach()), draw(6).round(), draw(1, seed=1)),
    operator("float64", lambda a: a.double().sum().float(), draw(9)),
]  # fmt: skip


def _list_against_dispatcher(target: DeviceUnderTest) -> CheckFinding:
    """Check that the MPS kernels in torch's operator list are registered with the dispatcher."""
    from whet.device.operators import mps_kernels, read_operators

    if target.device.kind != "mps":
        return not_applicable("torch's list is read for MPS")
    operators = read_operators()
    listed = [operator.name for operator in mps_kernels(operators)]
    figures = {"num_overloads": len(operators), "num_with_mps_kernel": len(listed)}
    if target.is_virtual:
        return not_applicable("the simulation is made from this list", **figures)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    absent = [name for name in listed if not has_kernel(f"aten::{name}", "MPS")]
    if absent:
        return differs(
            f"{len(absent)} of {len(listed)} listed kernels are absent", **figures, absent=" ".join(absent[:40])
        )
    return good(f"all {len(listed)} kernels of torch's list are there", **figures)


CHECKS: list[Check] = [
    Check(name="torch's list", run=_list_against_dispatcher, is_quick=True),
    *_ALGEBRA,
    *_POINTWISE,
    *_REDUCTIONS,
    *_INDEXING,
    *_LOSSES,
    *LAYERS,
    *UPDATES,
    *_LACKING,
]
