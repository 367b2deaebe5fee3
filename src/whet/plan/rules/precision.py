"""In which number format the model computes."""

from whet.plan.rule import Decision, RuleContext, one_of, rule

_TENSOR_CORES_WITH_TF32 = 8.0


@rule("P1", "precision", one_of("fp32", "tf32", "bf16", "fp16"))
def choose_precision(facts: RuleContext) -> Decision:
    """The number format of matrix products: fp32, tf32, bf16 or fp16; weights and optimizer stay float32.

    Why: half precision is not faster by itself. On MPS it ran from 17 % slower to 31 % faster, depending on chip
    and model. On a CPU with native bf16 a product was 2.8 times faster, without it 60 to 100 times slower. So fp32
    holds until a measurement shows a gain and the loss and gradients agree. Where CUDA's tensor cores take float32
    inputs (capability 8.0 and later), tf32 is used: range of float32, 10 bits of mantissa inside the product,
    float32 sums.
    When wrong: large matrix-bound models on CUDA and on M5, where bf16 often wins.
    Override: precision=bf16 (also fp32, tf32, fp16); forward_dtype=bfloat16 is understood.
    Sources: xiaoran007/GPU-Insights benchmark data 2025; minimind#852; nanochat#685; own
    measurements of bf16 and fp16 on AVX2 and AVX512-BF16.
    """
    accelerator = facts.accelerator
    capability = accelerator.capability if accelerator else None
    if facts.device == "cuda":
        if capability is None:
            return Decision(
                value="fp32", reason="the GPU's capability is unknown", evidence={"compute_capability": None}
            )
        if _as_number(capability) >= _TENSOR_CORES_WITH_TF32:
            return Decision(
                value="tf32",
                reason=f"tensor cores take float32 inputs here (capability {capability}); bf16 waits for a measurement",
                evidence={"compute_capability": capability},
            )
        return Decision(
            value="fp32", reason=f"capability {capability} has no tf32", evidence={"compute_capability": capability}
        )
    if facts.device == "mps":
        return Decision(
            value="fp32",
            reason="half precision gains on some chips and loses on others; not measured yet",
            evidence={"gpu_family": capability},
        )
    has_bf16 = facts.machine.cpu.has_bf16
    reason = {
        True: "the cores have bf16, but it has not been measured yet",
        False: "no native bf16 here: 60 to 100 times slower",
        None: "whether the cores have bf16 is unknown",
    }[has_bf16]
    return Decision(value="fp32", reason=reason, evidence={"has_bf16": has_bf16})


@rule("P2", "loss_scaling", one_of("off", "dynamic"))
def choose_loss_scaling(facts: RuleContext) -> Decision:
    """Whether the loss is scaled before the backward pass.

    Why: only fp16 needs it, since its smallest numbers are about 6e-8; bf16 has the range of float32. On MPS a scaler
    together with a fused optimizer is right from torch 2.13 on; before, the optimizer ignored the scale, so whet's own
    is not fused then (rule K1), and a fused one of yours, or weights in half precision, are refused.
    When wrong: an fp16 model whose gradients are known to be large.
    Override: choose another precision.
    Sources: pytorch/pytorch#186360, #184286, #150255.
    """
    precision = facts.precision
    if precision == "fp16":
        return Decision(value="dynamic", reason="fp16 gradients underflow without it", evidence={"precision": "fp16"})
    return Decision(value="off", reason=f"{precision} does not need it", evidence={"precision": precision})


def _as_number(capability: str) -> float:
    try:
        return float(capability)
    except ValueError:
        return 0.0


RULES = (choose_precision, choose_loss_scaling)
