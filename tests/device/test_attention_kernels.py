"""whet's attention kernels equal torch's formulas: on a real CUDA GPU, and in triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from triton_interpreter import complaints, needs_triton
from whet.device.kernels import group_norm as whet_norm
from whet.device.kernels import rowwise as whet_gate
from whet.device.kernels.attention import Spans, rotary_attention, span_attention, span_attention_op
from whet.device.kernels.group_norm import group_norm_act, group_norm_activation
from whet.device.kernels.rowwise import swiglu_op
from whet.device.kernels.switches import use_whet_kernels
from whet.recipes.chat.architecture import ChatArch as ChatArch
from whet.recipes.chat.model import build_model
from whet.recipes.hex.architecture import HexArch
from whet.recipes.hex.model import HexNet
from whet.recipes.layers import AttentionArgs, PostNormBlock, RotaryAngles, apply_rotary, rotary_angles

pytestmark = [
    pytest.mark.torch,
    # torch says so when the first product of a process is one of a backward pass, which runs in a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

on_gpu = pytest.mark.gpu("cuda")
SHAPES = [(97, 8, 64), (17, 3, 32), (128, 2, 128), (1, 1, 64)]
SPANS = [((5, 70, 1, 130, 3), 2, 32), ((200,), 1, 64), ((1,) * 70, 1, 32), ((64, 64, 10), 3, 64)]
NORMS = [((2, 128, 13, 13), 8), ((2, 128, 13, 13), 32), ((3, 32, 5, 5), 8), ((1, 8, 19, 19), 1), ((2, 24, 8, 8), 3)]


def by_torch(mixture: Tensor, turns: RotaryAngles, num_heads: int) -> Tensor:
    queries, keys, values = mixture.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    result = functional.scaled_dot_product_attention(apply_rotary(queries, turns), apply_rotary(keys, turns), values)
    return result.transpose(1, 2).flatten(2)


def by_formula(mixture: Tensor) -> Tensor:
    gates, up = mixture.chunk(2, dim=-1)
    return functional.silu(gates) * up


def errors(ours, theirs, mixture: Tensor) -> tuple[float, float]:
    """Return the largest errors of results and gradients relative to float64."""
    wide = mixture.detach().double().requires_grad_()
    near = mixture.detach().clone().requires_grad_()
    expected, result = theirs(wide), ours(near)
    slopes = torch.randn_like(result)
    expected.backward(slopes.double())
    result.backward(slopes)
    assert wide.grad is not None
    assert near.grad is not None
    return (
        float((result - expected).detach().abs().max() / expected.detach().abs().max()),
        float((near.grad - wide.grad).abs().max() / wide.grad.abs().max()),
    )


def check(device: str, dtype: torch.dtype, *, rows: int, bound: float, shapes=SHAPES) -> None:
    torch.manual_seed(0)
    for places, heads, size in shapes:
        turns = tuple(table.to(device) for table in rotary_angles(torch.arange(places), size))
        mixture = torch.randn(rows, places, 3 * heads * size, device=device).to(dtype)
        result = errors(
            lambda x, h=heads, t=turns: rotary_attention(x, *t, h),
            lambda x, h=heads, t=turns: by_torch(x, t, h),
            mixture,
        )
        assert max(result) <= bound, (places, heads, size, result)
    assert max(errors(swiglu_op, by_formula, torch.randn(rows, 5, 2 * 700, device=device).to(dtype))) <= bound


def spans_of(lengths: tuple[int, ...], device: str) -> tuple[Spans, Tensor]:
    starts = torch.tensor((0, *lengths), device=device).cumsum(0)
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=device), starts.diff())
    return Spans.of(starts[owners], starts[owners + 1]), starts[owners]


def spans_by_torch(mixture: Tensor, firsts: Tensor, num_heads: int, *, is_causal: bool, is_turned: bool) -> Tensor:
    queries, keys, values = mixture.unflatten(-1, (3, num_heads, -1)).permute(1, 2, 0, 3)
    places = torch.arange(len(mixture), device=mixture.device)
    if is_turned:
        turns = rotary_angles(places - firsts, queries.shape[-1])
        turns = tuple(table.to(mixture.dtype) for table in turns)
        queries, keys = (
            x * turns[0] + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * turns[1] for x in (queries, keys)
        )
    may_look = firsts[:, None] == firsts
    if is_causal:
        may_look &= places[:, None] >= places
    result = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=may_look)
    return result.transpose(0, 1).flatten(1)


def check_spans(device: str, dtype: torch.dtype, *, bound: float) -> None:
    """Results and gradients against float64, causal or not, rotated or not; repeated calls give the same bits."""
    torch.manual_seed(0)
    for lengths, heads, size in SPANS:
        spans, firsts = spans_of(lengths, device)
        tables = tuple(table.to(device) for table in rotary_angles(torch.arange(max(lengths)), size))
        for is_causal in (False, True):
            for turns in ((), tables):
                mixture = torch.randn(len(firsts), 3 * heads * size, device=device).to(dtype)
                result = errors(
                    lambda x, s=spans, h=heads, c=is_causal, t=turns: span_attention(
                        x, s, num_heads=h, is_causal=c, rotary=t
                    ),
                    lambda x, f=firsts, h=heads, c=is_causal, t=turns: spans_by_torch(
                        x, f, h, is_causal=c, is_turned=bool(t)
                    ),
                    mixture,
                )
                assert max(result) <= bound, (lengths, heads, size, is_causal, bool(turns), result)
        (one, its_slopes), (two, others) = (there_and_back(mixture, spans, heads, tables) for _ in range(2))
        assert torch.equal(one, two)
        assert torch.equal(its_slopes, others)
    mixture = torch.randn(74, 3 * 64, device=device).to(dtype).requires_grad_()
    spans, _ = spans_of((70, 4), device)
    tables = [table.to(device) for table in rotary_angles(torch.arange(70), 32)]
    for turns in ([], tables):
        torch.library.opcheck(span_attention_op, (mixture, spans.starts, spans.tiles, turns, 2, True))


def there_and_back(mixture: Tensor, spans: Spans, num_heads: int, turns: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    mixture = mixture.detach().clone().requires_grad_()
    result = span_attention(mixture, spans, num_heads=num_heads, is_causal=True, rotary=turns)
    result.backward(result.detach())
    assert mixture.grad is not None
    return result.detach(), mixture.grad


def check_norms(device: str, dtype: torch.dtype, *, bound: float, shapes=NORMS) -> None:
    """Results and gradients with silu and relu, against float64; eps is large enough to matter."""
    torch.manual_seed(0)
    for shape, groups in shapes:
        for is_silu in (True, False):
            x = (3 * torch.randn(shape, device=device) + 2).to(dtype).contiguous(memory_format=torch.channels_last)
            weight, bias = torch.randn(2, shape[1], device=device) + 1
            near = [t.clone().requires_grad_() for t in (x, weight, bias)]
            wide = [t.double().requires_grad_() for t in (x, weight, bias)]
            result, _ = group_norm_act(*near, groups, 0.1, is_silu)
            expected = whet_norm.reference(*wide, groups, 0.1, is_silu)
            slopes = torch.randn_like(result)
            result.backward(slopes)
            expected.backward(slopes.double())
            assert result.dtype == dtype
            assert result.stride() == near[0].grad.stride() == x.stride()
            pairs = [(result, expected), *((one.grad, other.grad) for one, other in zip(near, wide, strict=True))]
            off = [float((one - other).detach().abs().max() / other.detach().abs().max()) for one, other in pairs]
            assert max(off) <= bound, (shape, groups, is_silu, off)


def check_as_operator(device: str, dtype: torch.dtype) -> None:
    """The fake implementations (shapes, strides, gradients) agree with the kernels."""
    x = torch.randn(2, 16, 5, 5, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 16, device=device)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(group_norm_act, (*tensors, 4, 1e-5, True))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_group_norms_with_activations_are_torchs(dtype: torch.dtype) -> None:
    check_norms("cuda", dtype, bound=2e-2)
    check_as_operator("cuda", dtype)


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("block", ["plain", "bottleneck"])
def test_a_hex_net_computes_the_same_with_them(block: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = HexNet(HexArch(depth=2, width=64, block=block)).cuda().to(memory_format=torch.channels_last)
    boards = torch.randint(0, 3, (16, 9, 9), device="cuda")
    calls: list[bool] = []

    def logged(*args):
        calls.append(True)
        return group_norm_act(*args)

    if not is_compiled:
        monkeypatch.setattr(whet_norm, "group_norm_act", logged)

    def run() -> list[Tensor]:
        net.zero_grad()
        call = torch.compile(net) if is_compiled else net
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = call(boards)
        sum(part.float().clamp(min=-100).square().sum() for part in result).backward()
        return [*(part.float() for part in result), *(p.grad for p in net.parameters())]

    plain = run()
    with use_whet_kernels("norms"):
        own = run()
    assert len(calls) == (0 if is_compiled else 1 + 2 * (3 if block == "bottleneck" else 2)), "and no other run"
    for one, other in zip(plain, own, strict=True):
        assert torch.linalg.norm(one - other) <= 3e-2 * torch.linalg.norm(one)


def test_a_norm_that_they_are_not_for_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: every tensor counts as half precision on CUDA, and the kernel only records its call."""
    monkeypatch.setattr(whet_norm, "is_supported", lambda _: True)
    monkeypatch.setattr(whet_norm, "group_norm_act", lambda *given: ("whet", given))
    x = torch.randn(2, 16, 5, 5).to(memory_format=torch.channels_last)
    fits, silu = torch.nn.GroupNorm(4, 16), torch.nn.SiLU()
    assert isinstance(group_norm_activation(fits, silu, x), Tensor), "not selected"
    with use_whet_kernels("norms"):
        assert group_norm_activation(fits, silu, x) == "whet"
        assert group_norm_activation(fits, torch.nn.ReLU(), x) == "whet"
        others = {
            "contiguous": (fits, silu, x.contiguous()),
            "gelu": (fits, torch.nn.GELU(), x),
            "batch norm": (torch.nn.BatchNorm2d(16), silu, x),
            "no weights": (torch.nn.GroupNorm(4, 16, affine=False), silu, x),
            "six channels": (torch.nn.GroupNorm(4, 24), silu, torch.randn(2, 24, 7, 7)),
            "large": (torch.nn.GroupNorm(1, 16), silu, torch.randn(1, 16, 40, 40)),
            "empty": (fits, silu, x[:0]),
        }
        for name, (norm, activation, given) in others.items():
            given = given if name == "contiguous" else given.to(memory_format=torch.channels_last)
            assert torch.equal(group_norm_activation(norm, activation, given), activation(norm(given))), name
        seen: list[bool] = []
        watched = torch.nn.GroupNorm(4, 16)
        watched.register_forward_hook(lambda *_: seen.append(True))
        group_norm_activation(watched, silu, x)
        assert seen, "a hook is called"
    assert isinstance(group_norm_activation(fits, silu, x), Tensor), "no longer selected"


def test_a_gate_of_our_own_is_used_while_whet_computes_alone_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: every tensor counts as half precision on CUDA, and the kernel only records its call."""
    monkeypatch.setattr(whet_gate, "is_supported", lambda _: True)
    monkeypatch.setattr(whet_gate, "swiglu_op", lambda _: "whet")
    x = torch.randn(3, 8)
    assert torch.equal(whet_gate.swiglu(x), by_formula(x))
    with use_whet_kernels("gates"):
        assert whet_gate.swiglu(x) == "whet"
    assert torch.equal(whet_gate.swiglu(x), by_formula(x))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_and_gradients_are_torchs(dtype: torch.dtype) -> None:
    check("cuda", dtype, rows=600, bound=2e-2)


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_block_computes_the_same_with_them(is_compiled: bool) -> None:
    torch.manual_seed(0)
    block = PostNormBlock(128, num_heads=2, expansion=4).cuda()
    look = AttentionArgs(rotation=tuple(table.cuda() for table in rotary_angles(torch.arange(20), 64)))
    call = torch.compile(block) if is_compiled else block
    x = torch.randn(6, 20, 128, device="cuda")

    def run() -> list[Tensor]:
        block.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = call(x, look)
        result.float().square().sum().backward()
        return [result.float(), *(p.grad for p in block.parameters())]

    plain = run()
    with use_whet_kernels("attention"):
        own = run()
    for one, other in zip(plain, own, strict=True):
        assert torch.linalg.norm(one - other) <= 2e-2 * torch.linalg.norm(one)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spans_are_attended_as_torch_does(dtype: torch.dtype) -> None:
    check_spans("cuda", dtype, bound=2e-2)


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["trm", "gpt"])
def test_a_chat_model_computes_the_same_with_spans(kind: str, is_compiled: bool) -> None:
    torch.manual_seed(0)
    arch = ChatArch(kind=kind, hidden_size=128, num_heads=2, seq_len=100)
    model = build_model(arch, vocab_size=50).cuda()
    tokens = torch.randint(0, 50, (3, 100), device="cuda")
    is_start = torch.rand(3, 100, device="cuda") < 0.05
    is_start[:, 0] = True
    targets = tokens.roll(-1, 1)
    call = torch.compile(model) if is_compiled else model

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = torch.stack(call(tokens, is_start, targets)).mean()
        result.backward()
        return [result.detach(), *(p.grad for p in model.parameters())]

    plain = run()
    with use_whet_kernels("attention"):
        own = run()
    for one, other in zip(plain, own, strict=True):
        assert torch.linalg.norm(one - other) <= 5e-2 * torch.linalg.norm(one)


@needs_triton
def test_interpreted_on_the_cpu_they_compute_the_same() -> None:
    call = "a._MANY = 1; t.check('cpu', torch.float32, rows=2, bound=1e-5, shapes=[(17, 3, 32)])"
    call += "; t.check_norms('cpu', torch.float32, bound=1e-5); t.check_as_operator('cpu', torch.float32)"
    call += "; t.check_spans('cpu', torch.float32, bound=1e-5)"
    assert complaints(f"import test_attention_kernels as t, torch, whet.device.kernels.attention as a; {call}") == ""
