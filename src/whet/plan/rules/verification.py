"""Rules for the checks before the first step."""

from whet.plan.rule import Decision, RuleContext, one_of, rule


@rule("V1", "verify", one_of("on", "off", "always"))
def choose_verify(facts: RuleContext) -> Decision:
    """Whether the model is verified before the first step: on (once for the same model here), always, or off.

    Why: wrong results of a device raise no error. On MPS and CUDA a tiny batch shows the loss and every gradient beside
    the CPU's, and whether the same bits come twice; a model whose outputs are given is tried for causality on every
    device. It takes a second or two for small models, leaves no trace in the training, and what passed is remembered.
    A compiled model is compared with its own code on every device, each time (rule K2).
    When wrong: a large model whose first step cannot wait for the CPU.
    Override: verify=off, or verify=always; also when a run goes on.
    Sources: pytorch/pytorch#195910, #177116, #192212; docs/verify.md.
    """
    is_cpu = facts.device == "cpu"
    reason = "the CPU is what others are compared with: causality only" if is_cpu else "wrong results raise no error"
    return Decision(value="on", reason=reason, evidence={"device": facts.device})


@rule("V2", "causal_mask", one_of("flag", "explicit"))
def choose_causal_mask(facts: RuleContext) -> Decision:
    """How causal attention is asked for: by the flag is_causal as the model does, or by an explicit mask instead.

    Why: the flag is faster and needs no mask in memory. In half precision on MPS it has let places see what comes
    after them; the check before the first step finds that, and a run then goes on with masks and says so.
    When wrong: where the check cannot see a leak: a model without `outputs`.
    Override: causal_mask=explicit.
    Sources: pytorch/pytorch#195910.
    """
    return Decision(value="flag", reason="as the model asks for it", evidence={"device": facts.device})


RULES = (choose_verify, choose_causal_mask)
