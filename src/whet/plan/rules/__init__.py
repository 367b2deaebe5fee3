"""Every rule, in the order of decision: a rule may look at what the rules before it decided."""

from whet.plan.rule import Rule
from whet.plan.rules import attention, care, checkpoints, checks, device, kernels, loading, memory, norms, precision

ALL: tuple[Rule, ...] = (
    *device.RULES,
    *precision.RULES,
    *kernels.RULES,
    *memory.RULES,
    *attention.RULES,
    *norms.RULES,
    *loading.RULES,
    *checkpoints.RULES,
    *care.RULES,
    *checks.RULES,
)
