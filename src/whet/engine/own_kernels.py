"""Is there something that whet's own kernels, which were asked for, are for? They would be passed by in silence."""

from whet.base.errors import UsageError
from whet.plan.own_attention import SPANS, own_attention_reason
from whet.plan.own_norms import BENT_GROUP_NORMS, own_norms_reason
from whet.plan.plan import Plan

_HALF = ("bf16", "fp16")


def refuse_idle_attention(plan: Plan) -> None:
    """Refuses attention=own for a model without such attention, or for batches or numbers that it is not for."""
    workload, lengths, precision = plan.workload, plan.value("lengths"), plan.value("precision")
    if own_attention_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths) is not None:
        if precision not in _HALF:
            raise UsageError(
                "whet's own attention is for half precision",
                got=f"attention=own precision={precision}",
                try_="precision=bf16, or attention=torch",
            )
        return
    if SPANS in workload.layers:
        raise UsageError(
            "whet's own attention is for texts that lie one behind the other",
            got=f"attention=own lengths={lengths}",
            try_="lengths=packed, or attention=torch",
        )
    raise UsageError(
        "the model has no attention that whet's own kernels are for", got="attention=own", try_="attention=torch"
    )


def refuse_idle_norms(plan: Plan) -> None:
    """Refuses norms=own for a model without such norms, or where they lie otherwise."""
    layers, layout, precision = plan.workload.layers, plan.value("layout"), plan.value("precision")
    if own_norms_reason(layers, layout=layout) is None:
        if BENT_GROUP_NORMS not in layers:
            raise UsageError(
                "the model has no norms that whet's own kernels are for", got="norms=own", try_="norms=torch"
            )
        raise UsageError(
            "whet's own group norms are for channels_last",
            got=f"norms=own layout={layout}",
            try_="layout=channels_last, or norms=torch",
        )
    if precision not in _HALF:
        raise UsageError(
            "whet's own norms are for half precision",
            got=f"norms=own precision={precision}",
            try_="precision=bf16, or norms=torch",
        )
