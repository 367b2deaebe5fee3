"""Rules for the precision in which the model computes."""

from whet.plan.rule import Decision, RuleContext, rule

# Ampere (8.0) is the first architecture with tf32 tensor cores.
_TF32_CAPABILITY = 8.0


@rule("P1", "precision")
def choose_precision(context: RuleContext) -> Decision:
    """The number format of matrix products: fp32, tf32, bf16 or fp16; weights and optimizer state stay float32.

    Why: half precision is not always faster. On MPS it was between 17 % slower and 31 % faster, depending on chip and
    model. A bf16 product on a CPU was 2.8 times faster with native bf16, and 60 to 100 times slower without. So fp32 is
    used until a measurement shows a gain, and loss and gradients agree. On CUDA with compute capability 8.0 or later,
    tf32 is used, because tensor cores accept float32 inputs there: it has the range of float32, a mantissa of 10 bits
    for the inputs of a product, and float32 sums.
    When wrong: large models on CUDA or M5 that are dominated by matrix products, where bf16 is often faster.
    Override: precision=bf16 (also fp32, tf32, fp16); forward_dtype=bfloat16 is understood.
    Sources: xiaoran007/GPU-Insights benchmark data 2025; minimind#852; nanochat#685; own
    measurements of bf16 and fp16 on AVX2 and AVX512-BF16.
    """
    accelerator = context.accelerator
    capability = accelerator.capability if accelerator else None
    if context.device_type == "cuda":
        evidence = {"compute_capability": capability}
        if capability is None:
            return Decision(value="fp32", reason="the GPU's capability is unknown", evidence=evidence)
        if _as_number(capability) >= _TF32_CAPABILITY:
            reason = f"tensor cores take float32 inputs here (capability {capability}); bf16 has not been measured"
            return Decision(value="tf32", reason=reason, evidence=evidence)
        return Decision(value="fp32", reason=f"capability {capability} has no tf32", evidence=evidence)
    if context.device_type == "mps":
        return Decision(
            value="fp32",
            reason="half precision is faster on some chips and slower on others; not measured yet",
            evidence={"gpu_family": capability},
        )
    # The value is fp32 in all of these cases. The reason states whether measuring bf16 is worthwhile.
    has_bf16 = context.machine.cpu.has_bf16
    reason = {
        True: "the cores have bf16, but it has not been measured yet",
        False: "no native bf16 here: 60 to 100 times slower",
        None: "whether the cores have bf16 is unknown",
    }[has_bf16]
    return Decision(value="fp32", reason=reason, evidence={"has_bf16": has_bf16})


@rule("P2", "loss_scaling")
def choose_loss_scaling(context: RuleContext) -> Decision:
    """Whether the loss is scaled before the backward pass.

    Why: only fp16 needs it, because its smallest numbers are about 6e-8. bf16 has the range of float32. On MPS, a
    scaler with a fused optimizer is correct from torch 2.13 on. Earlier releases ignore the scale, so with them whet's
    own optimizer is not fused (rule K1), and your fused optimizer or weights in half precision are rejected.
    When wrong: an fp16 model whose gradients are known to be large.
    Override: choose another precision.
    Sources: pytorch/pytorch#186360, #184286, #150255.
    """
    precision = context.precision
    if precision == "fp16":
        return Decision(value="dynamic", reason="fp16 gradients underflow without it", evidence={"precision": "fp16"})
    return Decision(value="off", reason=f"{precision} does not need it", evidence={"precision": precision})


def _as_number(capability: str) -> float:
    try:
        return float(capability)
    except ValueError:
        return 0.0
