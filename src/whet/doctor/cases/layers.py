"""The modules that models are made of, for the table of operators."""

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from whet.doctor.case import Case, Finding, Place, differs, good
from whet.doctor.cases.comparing import compared
from whet.doctor.cases.trying import draw, forward_and_backward, layer, operator, whole
from whet.verify.agreement import HALF_CLOSE

_HEADS = [draw(2, 3, 12, 16, seed=seed) for seed in range(3)]
_SEEN = draw(2, 1, 12, 12).abs() > 0.3


class _Recurrent(nn.Module):
    """Gives only the outputs of a recurrent layer."""

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


def _dropout(place: Place) -> Finding:
    """Draws differ between devices; what must hold is the share, the scale and the gradient."""
    torch.manual_seed(0)
    x = place.put(torch.ones(200, 500)).requires_grad_()
    y = f.dropout(x, 0.3)
    y.sum().backward()
    assert x.grad is not None
    kept, gradient = y.detach().cpu(), x.grad.cpu()
    share = float((kept == 0).float().mean())
    is_scaled = bool(((kept - 1 / 0.7).abs() < 1e-4).logical_or(kept == 0).all())
    if abs(share - 0.3) < 0.01 and is_scaled and torch.allclose(kept, gradient):
        return good("the share, the scale and the gradient are right", share=share)
    return differs("the share, the scale or the gradient of what is dropped is wrong", share=share)


def _autocast(dtype: torch.dtype, place: Place) -> Finding:
    """A linear layer, a convolution and attention in half precision, against float32 on the CPU."""

    def compute(x: Tensor, weight: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        rows = f.linear(x, weight)
        heads = rows.view(2, 12, 3, 16).transpose(1, 2)
        attended = f.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return rows.float(), attended.float(), f.conv1d(rows, kernel).float(), f.layer_norm(rows, (48,)).float()

    def halved(*inputs: Tensor) -> tuple[Tensor, ...]:
        with place.device.autocast("fp16" if dtype == torch.float16 else "bf16"):
            return compute(*inputs)

    inputs = (draw(2, 12, 32), draw(48, 32, seed=1) / 6, draw(5, 12, 3, seed=2) / 6)
    expected = forward_and_backward(compute, inputs, torch.device("cpu"))
    found = forward_and_backward(halved, inputs, place.device.place)
    return compared(
        found, expected, tolerance=4 * HALF_CLOSE[dtype], right="close to float32", wrong="far from float32"
    )


LAYERS: list[Case] = [
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
             _SEEN),
    layer("MultiheadAttention", _SelfAttention, draw(2, 9, 16)),
    layer("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
          draw(2, 9, 16)),
    layer("LSTM", lambda: _Recurrent(nn.LSTM), draw(3, 7, 6)),
    layer("LSTM, both ways", lambda: _Recurrent(nn.LSTM, bidirectional=True), draw(3, 7, 6)),
    layer("GRU", lambda: _Recurrent(nn.GRU), draw(3, 7, 6)),
    layer("Embedding", lambda: nn.Embedding(20, 8, padding_idx=0), whole(4, 9, below=20)),
    layer("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), draw(5, 6)),
    Case(name="Dropout", run=_dropout, is_quick=True),
    Case(name="autocast fp16", run=lambda place: _autocast(torch.float16, place)),
    Case(name="autocast bf16", run=lambda place: _autocast(torch.bfloat16, place)),
]  # fmt: skip
