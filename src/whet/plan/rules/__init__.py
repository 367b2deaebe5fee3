"""All rules in the order of decision: a rule sees what the rules before it decided."""

from whet.plan.rule import Rule
from whet.plan.rules import (
    attention,
    care,
    checkpoints,
    device,
    kernels,
    loading,
    memory,
    norms,
    precision,
    verification,
)

ALL_RULES: tuple[Rule, ...] = (
    *device.RULES,
    *precision.RULES,
    *kernels.RULES,
    *memory.RULES,
    *attention.RULES,
    *norms.RULES,
    *loading.RULES,
    *checkpoints.RULES,
    *care.RULES,
    *verification.RULES,
)
