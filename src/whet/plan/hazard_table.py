"""Known wrong results on Apple GPUs, from PyTorch's sources and issues. They were not reproduced on a Mac.

`docs/hazards.md` is generated from this table.
"""

from dataclasses import dataclass

from whet.machine.facts import Release

ANY_WORKLOAD = frozenset[str]()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One known bug of MPS: the affected versions, its effect, and how whet handles it."""

    id: str
    what: str
    issue: str
    """Issue in pytorch/pytorch, such as "#177116", or the pull request with the fix if there is no issue."""
    answer: str
    """What whet does about the bug, or what the user can do."""
    is_avoided: bool = False
    """Whether whet avoids the bug. The user's code may still trigger it."""
    since: Release | None = None
    """First release of torch with the bug, or None if all supported releases before the fix have it."""
    fixed_in: Release | None = None
    """First release of torch that fixes the bug, or None if no fix is known."""
    macos_from: Release | None = None
    macos_until: Release | None = None
    """First release of macOS without the bug, or None if all later releases have it."""
    families: tuple[str, ...] = ()
    """Affected GPU families. Empty means all families."""
    needs: frozenset[str] = ANY_WORKLOAD
    """Traits of a workload that triggers the bug: layer kinds, "half", "fp16", "rows" or "huge batch"."""


_COMPARE_WITH_CPU = "to check, train a few steps with --device cpu as well and compare the losses"

HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        id="linear-rows",
        what="gradients are wrong by 1e3 and more when a product sums over more than 32,768 rows",
        issue="#177116",
        answer=(
            "the planned micro-batch stays below (rule M3), and a larger one causes a warning. The backward pass of a "
            "head over more than 32,768 tokens sums over them, with any micro-batch: whet computes nn.Linear heads in "
            "pieces; torch 2.14 or --device cpu avoids it for products of your own"
        ),
        is_avoided=True,
        fixed_in=(2, 14),
        families=("apple7", "apple8"),
        needs=frozenset({"rows"}),
    ),
    Hazard(
        id="linear-huge-batch",
        what="rows of a linear layer with bias are damaged when a batch dimension is above 65,536",
        issue="#189495",
        answer="nothing; keep micro_batch and lengths below 65,536",
        fixed_in=(2, 14),
        needs=frozenset({"huge batch"}),
    ),
    Hazard(
        id="linear-vector-bias",
        what="a linear layer drops its bias for a single vector",
        issue="#188438",
        answer="a micro-batch always has a dimension for its samples; single vectors inside your model are not avoided",
        fixed_in=(2, 14),
        macos_from=(26, 0),
        needs=frozenset({"vectors"}),
    ),
    Hazard(
        id="linear-half-m5",
        what="a linear layer without bias gives garbage in half precision, different each time",
        issue="#180776",
        answer="precision stays fp32 unless you ask for another",
        fixed_in=(2, 13),
        families=("apple10",),
        needs=frozenset({"linear", "half"}),
    ),
    Hazard(
        id="linear-abort-macos-27",
        what="a linear layer with a transposed weight in bf16 ends the process",
        issue="#197796",
        answer="precision stays fp32 unless you ask for another; the run resumes from its last checkpoint",
        fixed_in=(2, 14),
        macos_from=(27, 0),
        needs=frozenset({"linear", "half"}),
    ),
    Hazard(
        id="linear-5d",
        what="the backward pass of a linear layer ends the process when its input has more than 4 dimensions",
        issue="#187201",
        answer="nothing; flatten the leading dimensions before the layer",
        macos_from=(27, 0),
        needs=frozenset({"more than 4 dimensions"}),
    ),
    Hazard(
        id="linear-large",
        what="gradients of large linear layers differ from the CPU's",
        issue="#153957",
        answer=_COMPARE_WITH_CPU,
        needs=frozenset({"very large layers"}),
    ),
    Hazard(
        id="bmm-large",
        what="gradients of a batched product with more than 2**32 results are wrong",
        issue="#197636",
        answer="nothing; a smaller micro_batch",
        needs=frozenset({"very large layers"}),
    ),
    Hazard(
        id="product-out-slice",
        what="a product with out= a slice of another tensor does not write its result",
        issue="#193385",
        answer="whet has no such product; in your own code write out[...] = a @ b",
        is_avoided=True,
        # The fix was proposed for a patch release of 2.14. It is not known whether it was accepted. 2.15 does not run
        # on macOS 14.
        fixed_in=(2, 15),
        macos_until=(15, 0),
        needs=frozenset({"out="}),
    ),
    Hazard(
        id="conv-weights",
        what="conv2d is wrong when its weights are not contiguous",
        issue="#192212",
        answer="parameters are made contiguous before the first step",
        is_avoided=True,
        fixed_in=(2, 14),
        macos_from=(15, 0),
        needs=frozenset({"conv"}),
    ),
    Hazard(
        id="conv-kernel-256",
        what="conv2d is wrong for kernels of 256 and more",
        issue="#188335",
        answer=_COMPARE_WITH_CPU,
        fixed_in=(2, 14),
        needs=frozenset({"conv", "large kernel"}),
    ),
    Hazard(
        id="channels-last",
        what="channels_last crashes or gives wrong results in BatchNorm, convolutions and linear layers",
        issue="#188371",
        answer="the layout stays contiguous (rule K4)",
        is_avoided=True,
        fixed_in=(2, 14),
        needs=frozenset({"conv"}),
    ),
    Hazard(
        id="copy-converts",
        what="a copy to the CPU that also changes the dtype can overwrite the tensor it reads",
        issue="#189563",
        answer="whet copies first and converts afterwards; in your own code write .cpu() before .to(dtype)",
        is_avoided=True,
        fixed_in=(2, 14),
    ),
    Hazard(
        id="copy-gaps",
        what="a copy to the CPU of a view with gaps is wrong",
        issue="#189961",
        answer="whet makes a tensor contiguous on the GPU before it is copied; in your own code write .contiguous()",
        is_avoided=True,
        fixed_in=(2, 14),
    ),
    Hazard(
        id="copy-unawaited",
        what="non_blocking copies read memory that was freed, or return before the data is there",
        issue="#139550, #189690",
        answer="every copy waits (rule L4)",
        is_avoided=True,
    ),
    Hazard(
        id="pinned-memory",
        what="pin_memory() writes through an invalid pointer",
        issue="#86060",
        answer="nothing is pinned (rule L4)",
        is_avoided=True,
        fixed_in=(2, 14),
    ),
    Hazard(
        id="pinned-recycled",
        what="pinned memory can be reused before a copy from it has finished",
        issue="#193819",
        answer="nothing is pinned (rule L4)",
        is_avoided=True,
        since=(2, 14),
        fixed_in=(2, 15),
    ),
    Hazard(
        id="scalar-offset",
        what="an element of a CPU tensor in arithmetic with a GPU tensor: x * s[4] takes s[0]",
        issue="#187117",
        answer="whet has no such arithmetic; in your own code write s[4].item(), or move s first",
        is_avoided=True,
        fixed_in=(2, 14),
    ),
    Hazard(
        id="scaler-fused",
        what="fused optimizers ignore the loss scale and do not skip infinite gradients",
        issue="#186360",
        answer="before torch 2.13 the optimizer is not fused with fp16 (rule K1), and your own fused one is rejected",
        is_avoided=True,
        fixed_in=(2, 13),
        needs=frozenset({"fp16"}),
    ),
    Hazard(
        id="scaler-half-gradients",
        what="unscaling sets fp16 and bf16 gradients to zero",
        issue="#184286",
        answer="weights and gradients stay float32; half-precision weights with fp16 are rejected before torch 2.13",
        is_avoided=True,
        fixed_in=(2, 13),
        needs=frozenset({"fp16"}),
    ),
    Hazard(
        id="lstm-dropout-backward",
        what="the dropout of nn.LSTM is ignored in the backward pass",
        issue="#190056",
        answer="nothing; put nn.Dropout between your own layers",
        fixed_in=(2, 14),
        needs=frozenset({"lstm", "dropout"}),
    ),
    Hazard(
        id="lstm-dropout-forward",
        what="the dropout of nn.LSTM is not applied",
        issue="#185351",
        answer="nothing; put nn.Dropout between your own layers",
        fixed_in=(2, 13),
        needs=frozenset({"lstm", "dropout"}),
    ),
    Hazard(
        id="lstm-permuted",
        what="the gradient of nn.LSTM with respect to its input is wrong when the input is not contiguous",
        issue="#175189",
        answer="nothing; write .contiguous() before the layer",
        needs=frozenset({"lstm", "permuted input"}),
    ),
    Hazard(
        id="batch-norm-permuted",
        what="gradients of BatchNorm are wrong by orders of magnitude when its input is permuted or channels_last",
        issue="#175189",
        answer="the layout stays contiguous (rule K4); after a permute of your own write .contiguous()",
        needs=frozenset({"batch norm", "permuted input"}),
    ),
    Hazard(
        id="batch-norm-3d-abort",
        what="BatchNorm3d ends the process when its input is not contiguous",
        issue="#190645",
        answer="nothing; write .contiguous() before the layer",
        needs=frozenset({"batch norm", "permuted input"}),
    ),
    Hazard(
        id="layer-norm-small-variance",
        what="layer_norm is inaccurate for rows of small variance",
        issue="#190491",
        answer=_COMPARE_WITH_CPU,
        fixed_in=(2, 14),
        needs=frozenset({"layer norm"}),
    ),
    Hazard(
        id="layer-norm-frozen",
        what="the gradient of layer_norm is wrong when its input is frozen",
        issue="#183825",
        answer=_COMPARE_WITH_CPU,
        fixed_in=(2, 13),
        needs=frozenset({"layer norm", "frozen"}),
    ),
    Hazard(
        id="rms-norm-half",
        what="the fused RMSNorm rounds wrongly in half precision",
        issue="#189617",
        answer="precision stays fp32 unless you ask for another",
        fixed_in=(2, 14),
        needs=frozenset({"rms norm", "half"}),
    ),
    Hazard(
        id="adaptive-max-pool",
        what="adaptive_max_pool is wrong for sizes that do not divide",
        issue="#189659",
        answer="nothing; choose sizes that divide",
        fixed_in=(2, 14),
        needs=frozenset({"adaptive max pool"}),
    ),
    Hazard(
        id="gelu-overflow",
        what="gelu and tanh overflow to NaN for large inputs",
        issue="#186278",
        answer="a step with NaN or Inf is skipped; too many stop the run",
        fixed_in=(2, 13),
        needs=frozenset({"gelu"}),
    ),
    Hazard(
        id="sort-range",
        what="sort returns indices out of range for booleans, largest integers and NaN",
        issue="#184620",
        answer=_COMPARE_WITH_CPU,
        fixed_in=(2, 13),
        needs=frozenset({"sort"}),
    ),
    Hazard(
        id="amax-int64",
        what="amax and amin of int64 tensors return 0",
        issue="#191104",
        answer="nothing; convert to int32 or float first",
        # c10/metal/reduction_utils.h of the wheels: 2.13 introduces the reduction, 2.14 keeps all lanes active.
        since=(2, 13),
        fixed_in=(2, 14),
        needs=frozenset({"amax"}),
    ),
    Hazard(
        id="unique-counts",
        what="unique with return_counts is wrong for half a million elements and more",
        issue="#111173",
        answer="nothing; compute it on the CPU: x.cpu().unique(...)",
        fixed_in=(2, 14),
        needs=frozenset({"unique"}),
    ),
    Hazard(
        id="roi-align-backward",
        what="torchvision's roi_align adds each gradient several times, up to 100 times with 512 boxes",
        issue="#190632",
        answer="nothing; torchvision 0.29, which needs torch 2.14, or --device cpu",
        fixed_in=(2, 14),
        needs=frozenset({"roi_align"}),
    ),
    Hazard(
        id="roi-pool-backward",
        what="torchvision's roi_pool, ps_roi_align and ps_roi_pool add each gradient several times",
        issue="#190632",
        # The Metal source in the wheel of torchvision 0.29 still has the loop that was removed from roi_align.
        answer="nothing; roi_align with torchvision 0.29, or --device cpu",
        needs=frozenset({"roi_pool"}),
    ),
    Hazard(
        id="attention-hides-nan",
        what="attention without gradients returns numbers where its input is NaN",
        issue="#188147",
        answer="training uses another kernel and detects NaN; an evaluation may miss it",
        is_avoided=True,
        fixed_in=(2, 14),
        needs=frozenset({"attention", "no gradients"}),
    ),
    Hazard(
        id="attention-permuted",
        what="attention is wrong for permuted queries, keys and values with more than one sample",
        issue="#181133",
        answer="nothing; make them contiguous",
        fixed_in=(2, 12),
        needs=frozenset({"attention"}),
    ),
    Hazard(
        id="attention-macos-26.3",
        what="attention is less accurate than on macOS 26.2 with the same torch",
        issue="#181742",
        answer=_COMPARE_WITH_CPU,
        macos_from=(26, 3),
        needs=frozenset({"attention"}),
    ),
    Hazard(
        id="product-expanded",
        what="a product of expanded tensors is wrong",
        issue="#180201",
        answer="nothing; make them contiguous",
        fixed_in=(2, 12),
        macos_from=(15, 0),
        macos_until=(26, 4),
        needs=frozenset({"expanded tensors"}),
    ),
    Hazard(
        id="product-fp16-padding",
        what="a product with a vector overflows in fp16",
        issue="#178056",
        answer="precision stays fp32 unless you ask for another",
        fixed_in=(2, 12),
        needs=frozenset({"half"}),
    ),
    Hazard(
        id="masked-fill",
        what="masked_fill writes wrong places of a tensor that is not contiguous",
        issue="#176159",
        answer="nothing; make it contiguous",
        fixed_in=(2, 12),
        needs=frozenset({"masked fill"}),
    ),
)

# Bugs of older releases of torch, as (fixed in, issue, what).
BEFORE_2_11: tuple[tuple[str, str, str], ...] = (
    ("2.11", "#174861", "attention in half precision with grouped queries damaged memory"),
    ("2.10", "#165257", "random in-place operators wrote wrong places of tensors that are not contiguous"),
    ("2.10", "#160841", "attention overflowed in fp16"),
    ("2.9", "#156555", "the gradient of batch_norm was wrong"),
    ("2.9", "#161640", "linear layers were wrong for tensors that are not contiguous"),
    ("2.4", "#118115", "Adam did not update transposed weights"),
    ("2.4", "#124335", "copies of 4 GiB and more were wrong"),
)
