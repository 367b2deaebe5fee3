"""Rules for the checks before the first step, and for the causal mask, which a check may change."""

from whet.plan.rule import Decision, RuleContext, rule


@rule("V1", "verify")
def choose_verify(context: RuleContext) -> Decision:
    """Whether the model is verified before the first step: on (once for the same model on this machine), always, off.

    Why: a device can compute wrong results without an error. On MPS and CUDA, loss and gradients of a tiny batch are
    compared with those of the CPU, and computed twice to see whether the bits repeat. A model with `outputs` is checked
    for causality on every device. This takes a second or two for small models, does not affect training, and a pass is
    remembered. A compiled model is compared with its eager code on every device, each time (rule K2).
    When wrong: a large model whose first step cannot wait for the CPU.
    Override: verify=off, or verify=always; also when a run is resumed.
    Sources: pytorch/pytorch#195910, #177116, #192212; docs/verify.md.
    """
    is_cpu = context.device_type == "cpu"
    reason = "the CPU is the reference: only causality is checked" if is_cpu else "wrong results raise no error"
    return Decision(value="on", reason=reason, evidence={"device": context.device_type})


@rule("V2", "causal_mask")
def choose_causal_mask(context: RuleContext) -> Decision:
    """How causal attention is requested: by the flag is_causal, as the model does, or by an explicit mask.

    Why: the flag is faster and needs no mask in memory. In half precision on MPS, it has let positions attend to later
    ones. The check before the first step detects this, and the run then uses masks and reports it.
    When wrong: a model without `outputs`, for which the check cannot detect a leak.
    Override: causal_mask=explicit.
    Sources: pytorch/pytorch#195910.
    """
    return Decision(value="flag", reason="as the model requests it", evidence={"device": context.device_type})
