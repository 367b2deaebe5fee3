"""whet's kernels for norms over sums equal torch's: on a real CUDA GPU, and in triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from triton_interpreter import complaints, needs_triton
from whet.data.batch import Packed
from whet.device.kernels import rowwise
from whet.device.kernels.rowwise import residual_layer_norm, residual_norm_op, rms_norm_sum
from whet.device.kernels.switches import use_whet_kernels
from whet.recipes.chat.architecture import ChatArch as ChatArch
from whet.recipes.chat.model import build_model
from whet.recipes.layers import rms_norm
from whet.recipes.text.bert import Bert

pytestmark = pytest.mark.torch

on_gpu = pytest.mark.gpu("cuda")
SUMS = [((5, 48), 0.0), ((3, 7, 100), 0.1), ((1, 16), 0.5)]


def by_formula(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def with_gaps(x: Tensor) -> Tensor:
    """Return the same numbers in a non-contiguous tensor."""
    return x.repeat_interleave(2, -1)[..., ::2]


def check_sum_norms(device: str, dtype: torch.dtype, *, bound: float, more=()) -> None:
    """Results and gradients against float64 for the same draws, for any inputs that require gradients. The bits are
    reproducible, also for non-contiguous tensors."""
    torch.manual_seed(0)
    for shape, share in (*SUMS, *more):
        x, before = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device) + 1
        plus, weight, bias = torch.randn(3, shape[-1], device=device) + 1
        seed = torch.randint(2**62, (1,), device=device) if share else None
        ones, zeros = torch.ones_like(x), torch.zeros_like(before)
        stays = residual_norm_op(ones, torch.zeros_like(plus), zeros, weight, bias, seed, share, 0.1)[2]
        for asked in ((0,), (1,), (0, 1)):
            near = [t.clone().requires_grad_() for t in (x, plus, before, weight, bias)]
            wide = [t.double().requires_grad_() for t in (x, plus, before, weight, bias)]
            result = residual_norm_op(*near, seed, share, 0.1)[:2]
            assert (result[0].dtype, result[1].dtype) == (torch.float32, dtype)
            expected = functional.layer_norm((wide[0] + wide[1]) * stays.double() + wide[2], shape[-1:], *wide[3:], 0.1)
            slopes = [torch.randn_like(result[way]) for way in asked]
            torch.autograd.backward([result[way] for way in asked], slopes)
            expected.backward(sum(slope.double() for slope in slopes))
            pairs = [(part, expected) for part in result]
            pairs += [(one.grad, other.grad) for one, other in zip(near, wide, strict=True)]
            off = [float((one - other).detach().abs().max() / other.detach().abs().max()) for one, other in pairs]
            assert max(off) <= bound, (shape, share, asked, off)
            again = [t.clone().requires_grad_() for t in (x, plus, before, weight, bias)]
            gappy = [with_gaps(again[0]), again[1], with_gaps(again[2]), *again[3:]]
            twice = residual_norm_op(*gappy, seed, share, 0.1)[:2]
            torch.autograd.backward([twice[way] for way in asked], [with_gaps(slope) for slope in slopes])
            assert all(torch.equal(one.grad, other.grad) for one, other in zip(near, again, strict=True))
        given = [t.clone().requires_grad_() for t in (x, plus, before, weight, bias)]
        torch.library.opcheck(residual_norm_op, (*given, seed, share, 0.1))


def check_rms_sums(device: str, dtype: torch.dtype, *, bound: float) -> None:
    """Results and gradients against float64, with and without a residual."""
    torch.manual_seed(0)
    for shape in ((5, 48), (3, 7, 100), (1, 16)):
        for has_added in (True, False):
            given = [3 * torch.randn(shape, device=device).to(dtype) for _ in range(1 + has_added)]
            near = [t.clone().requires_grad_() for t in given]
            wide = [t.double().requires_grad_() for t in given]
            gappy = [with_gaps(t) for t in near]
            result = rms_norm_sum(gappy[0], gappy[1] if has_added else None, 0.1)[0]
            sums = sum(wide)
            expected = by_formula(sums, 0.1)
            slopes = torch.randn_like(result)
            result.backward(with_gaps(slopes))
            expected.backward(slopes.double())
            assert result.dtype == dtype
            pairs = [(result, expected), *((one.grad, other.grad) for one, other in zip(near, wide, strict=True))]
            off = [float((one - other).detach().abs().max() / other.detach().abs().max()) for one, other in pairs]
            assert max(off) <= bound, (shape, has_added, off)
            torch.library.opcheck(rms_norm_sum, (near[0], near[1] if has_added else None, 0.1))


def check_draws(device: str, tokens: int, width: int) -> None:
    """Dropout has the same rate in rows, columns, adjacent elements and across seeds."""
    share = 0.1
    ones, zeros = torch.ones(tokens, width, device=device), torch.zeros(tokens, width, device=device)

    def dropped(seed: int) -> Tensor:
        sums = residual_norm_op(
            ones, zeros[0], zeros, ones[0], zeros[0], torch.tensor([seed], device=device), share, 1e-5
        )[2]
        assert set(sums.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - share)))}
        return (sums == 0).double()

    one, two = dropped(7), dropped(2**40 + 7)
    for pair, expected in (((one, one), share), ((one, two), share**2)):
        assert float((pair[0] * pair[1]).mean()) == pytest.approx(expected, abs=5 * (expected / one.numel()) ** 0.5)
    for apart in range(1, 9):
        for near in (one[:, apart:] * one[:, :-apart], one[apart:] * one[:-apart]):
            assert float(near.mean()) == pytest.approx(share**2, abs=5 * share / near.numel() ** 0.5)
    for dim, number in ((0, tokens), (1, width)):
        assert float((one.mean(dim) - share).abs().max()) < 5 * (share / number) ** 0.5


def far(ones: list[Tensor], others: list[Tensor]) -> float:
    return max(float(torch.linalg.norm(a - b) / torch.linalg.norm(a)) for a, b in zip(ones, others, strict=True))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_and_gradients_are_torchs(dtype: torch.dtype) -> None:
    check_sum_norms("cuda", dtype, bound=2e-2, more=[((3000, 768), 0.1)])
    check_rms_sums("cuda", dtype, bound=2e-2)


@on_gpu
def test_dropout_drops_its_share_everywhere_alike() -> None:
    check_draws("cuda", 512, 256)


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_bert_computes_the_same_with_them(is_compiled: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = Bert(config).cuda()
    starts = torch.tensor([0, 5, 30, 61], device="cuda", dtype=torch.int32)
    texts = Packed(values=torch.randint(5, 50, (61,), device="cuda"), starts=starts, max_length=31)
    call = torch.compile(model) if is_compiled else model

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = functional.cross_entropy(call(texts).float(), torch.tensor([0, 2, 1], device="cuda"))
        result.backward()
        # A key's bias adds the same to all scores of a query: its gradient is rounding alone.
        return [result.detach(), *(p.grad for name, p in model.named_parameters() if "key.bias" not in name)]

    plain = run()
    with use_whet_kernels("norms"):
        own = run()
        model.network["bert"].encoder["layer"][0].output.dropout.p = 0.5
        thinned = [run()[0] for _ in range(2)]
    assert 0 < far(plain, own) <= 5e-2
    assert not torch.equal(*thinned), "and new masks are drawn"


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("kind", ["trm", "gpt"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_chat_model_computes_the_same_with_them(kind: str, is_compiled: bool) -> None:
    torch.manual_seed(0)
    model = build_model(ChatArch(kind=kind, hidden_size=128, num_heads=2, seq_len=100), vocab_size=50).cuda()
    tokens = torch.randint(0, 50, (3, 100), device="cuda")
    is_start = torch.zeros(3, 100, device="cuda", dtype=torch.bool)
    is_start[:, 0] = True
    call = torch.compile(model) if is_compiled else model

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = torch.stack(call(tokens, is_start, tokens.roll(-1, 1))).mean()
        result.backward()
        return [result.detach(), *(p.grad for p in model.parameters())]

    plain = run()
    with use_whet_kernels("norms"):
        own = run()
    assert far(plain, own) <= 5e-2
    # The backward pass starts from rounded results; a compiled model is unchanged.
    assert is_compiled or far(plain, own) > 0, "the kernels were not used"


def test_a_sum_that_they_are_not_for_is_torchs_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: every tensor counts as half precision on CUDA, and the kernel only records its call."""
    monkeypatch.setattr(rowwise, "is_supported", lambda _: True)
    monkeypatch.setattr(rowwise, "residual_norm_op", lambda *given: ("whet", *given[:3]))
    dense, dropout, norm = nn.Linear(24, 16), nn.Dropout(0.0), nn.LayerNorm(16)
    x, before = torch.randn(3, 24), torch.randn(3, 16)

    def is_own(dense=dense, dropout=dropout, norm=norm, x=x, before=before) -> bool:
        result, also = residual_layer_norm(dense, dropout, norm, x, before)
        if isinstance(result, str):
            return True
        assert result is also
        assert torch.equal(result, norm(dropout(dense(x)) + before))
        return False

    assert not is_own(), "not selected"
    with use_whet_kernels("norms"):
        assert is_own()
        watched = nn.LayerNorm(16)
        watched.register_forward_hook(lambda *_: None)
        others = {
            "another layer": {"dense": type("Thick", (nn.Linear,), {})(24, 16)},
            "no bias": {"dense": nn.Linear(24, 16, bias=False)},
            "no shift": {"norm": nn.LayerNorm(16, bias=False)},
            "nothing stays": {"dropout": nn.Dropout(1.0)},
            "no fours": {"dense": nn.Linear(24, 18), "norm": nn.LayerNorm(18), "before": torch.randn(3, 18)},
            "wide": {"before": before.double(), "norm": nn.LayerNorm(16).double()},
            "empty": {"x": x[:0], "before": before[:0]},
            "watched": {"norm": watched},
        }
        assert {name for name, given in others.items() if is_own(**given)} == set()
    assert not is_own(), "no longer selected"


def test_a_norm_without_weights_that_they_are_not_for_is_torchs_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: every tensor counts as half precision on CUDA, and the kernel only records its call."""
    monkeypatch.setattr(rowwise, "is_supported", lambda _: True)
    monkeypatch.setattr("whet.recipes.layers.rms_norm_sum", lambda *_: ("whet",))
    x = torch.randn(3, 16)
    assert torch.allclose(rms_norm(x), by_formula(x)), "not selected"
    with use_whet_kernels("norms"):
        assert rms_norm(x) == rms_norm(x, x) == "whet"
        for given in ((x[:, :15],), (x[:0],), (x, x.double()), (x, x[:1])):
            assert torch.allclose(rms_norm(*given), by_formula(sum(given)))
        compiled = torch.compile(rms_norm, backend="eager")
        assert torch.allclose(compiled(x), by_formula(x)), "the compiler fuses it itself"


@pytest.mark.parametrize(("kind", "number"), [("trm", 2 * 3 * 2 * 2), ("gpt", 2 * 2 + 1)])
def test_all_norms_of_a_chat_model_are_theirs_simulated(
    monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    """Simulated: half precision on a CPU counts as that of CUDA, and the kernel is torch's formula."""
    given: list[tuple[Tensor, Tensor | None]] = []

    def by_torch(x: Tensor, added: Tensor | None, eps: float) -> tuple[Tensor]:
        given.append((x, added))
        return (by_formula((x if added is None else x + added).float(), eps).to(x.dtype),)

    monkeypatch.setattr(rowwise, "is_supported", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr("whet.recipes.layers.rms_norm_sum", by_torch)
    arch = ChatArch(kind=kind, hidden_size=32, num_heads=2, seq_len=8, L_layers=2, match="parameters")
    tokens, is_start = torch.randint(0, 20, (2, 8)), torch.eye(2, 8, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16), use_whet_kernels("norms"):
        build_model(arch, vocab_size=20, dropout=0.1)(tokens, is_start)
    assert len(given) == number
    assert all((added is not None) == (kind == "trm") for _, added in given)


@needs_triton
def test_interpreted_on_the_cpu_they_compute_the_same() -> None:
    call = "t.check_rms_sums('cpu', torch.float32, bound=1e-5)"
    call += "; s._PROGRAMS = 3; t.check_sum_norms('cpu', torch.float32, bound=1e-5); t.check_draws('cpu', 40, 128)"
    assert complaints(f"import test_norm_kernels as t, torch, whet.device.kernels.rowwise as s; {call}") == ""
