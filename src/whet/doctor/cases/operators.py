"""Does the device have the operators that a training needs, and do they give what the CPU gives?"""

import torch
from torch.nn import functional as f

from whet.doctor.case import Case, Finding, Place, differs, good, not_applicable
from whet.doctor.cases.layers import LAYERS
from whet.doctor.cases.trying import draw, operator, whole
from whet.doctor.cases.updates import UPDATES

_MASK = draw(4, 6) > 0
_ROWS = torch.tensor([3, 0, 3, 1])
_WHERE = whole(4, 6, below=4)

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
    operator("unique", lambda a: a.unique(return_counts=True), whole(60, below=9)),
    operator("bincount, histc", lambda a: a.bincount(minlength=12), whole(60, below=9)),
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
    operator("embedding", f.embedding, whole(4, 9, below=20), draw(20, 8), is_quick=True),
    operator("embedding_bag", lambda i, w: f.embedding_bag(i, w), whole(4, 9, below=20), draw(20, 8)),
]  # fmt: skip
_LOSSES = [
    operator("cross_entropy", f.cross_entropy, draw(16, 50), whole(16, below=50), is_quick=True),
    operator("cross_entropy, smoothed and ignored", lambda a, i: f.cross_entropy(a, i, label_smoothing=0.1,
             ignore_index=3), draw(64, 9), whole(64, below=9)),
    operator("nll_loss, 2-d", lambda a, i: f.nll_loss(a.log_softmax(1), i), draw(3, 5, 4, 4), whole(3, 4, 4, below=5)),
    operator("mse, l1, huber", lambda a, b: (f.mse_loss(a, b), f.l1_loss(a, b), f.huber_loss(a, b)), draw(9),
             draw(9, seed=1)),
    operator("binary_cross_entropy", lambda a, b: (f.binary_cross_entropy_with_logits(a, b), f.binary_cross_entropy(
             a.sigmoid(), b)), draw(4, 6), draw(4, 6, seed=1).sigmoid()),
    operator("kl_div, cosine", lambda a, b: (f.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
             f.cosine_similarity(a, b)), draw(4, 6), draw(4, 6, seed=1)),
]  # fmt: skip
# Without an MPS kernel in torch 2.13; a newer one may have it.
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
    operator("multi_margin_loss", f.multi_margin_loss, draw(6, 5), whole(6, below=5)),
    operator("take", lambda a, i: a.take(i), draw(4, 6), _ROWS),
    operator("mode", lambda a: a.mode(-1).values, whole(4, 9, below=3)),
    operator("heaviside", lambda a, b: torch.heaviside(a.detach(), b.detach()), draw(6).round(), draw(1, seed=1)),
    operator("float64", lambda a: a.double().sum().float(), draw(9)),
]  # fmt: skip


def _list_against_dispatcher(place: Place) -> Finding:
    """What torch's list promises for MPS, and what this torch really has."""
    from whet.device.mps_operators import read_operators, with_mps_kernel

    if place.device.kind != "mps":
        return not_applicable("torch's list is read for MPS")
    operators = read_operators()
    listed = [operator.name for operator in with_mps_kernel(operators)]
    figures = {"num_overloads": len(operators), "num_with_mps_kernel": len(listed)}
    if place.is_virtual:
        return not_applicable("the simulation is made from this list", **figures)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    absent = [name for name in listed if not has_kernel(f"aten::{name}", "MPS")]
    if absent:
        return differs(
            f"{len(absent)} of {len(listed)} listed kernels are absent", **figures, absent=" ".join(absent[:40])
        )
    return good(f"all {len(listed)} kernels of torch's list are there", **figures)


CASES: list[Case] = [
    Case(name="torch's list", run=_list_against_dispatcher, is_quick=True),
    *_ALGEBRA,
    *_POINTWISE,
    *_REDUCTIONS,
    *_INDEXING,
    *_LOSSES,
    *LAYERS,
    *UPDATES,
    *_LACKING,
]
