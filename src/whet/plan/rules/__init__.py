"""All rules, in the order in which they decide. A rule sees the settings that earlier rules have decided.

To add a rule, declare the setting in `plan/values.py`, whose order is that of the rules, and write a documented
function with `@rule` in the file of its family. `make docs` writes its page.
"""

from whet.plan.rule import Rule
from whet.plan.rules import checkpoints, device, distributed, kernels, loading, memory, precision, verification
from whet.plan.values import SETTING_NAMES

_FAMILIES = (checkpoints, device, distributed, kernels, loading, memory, precision, verification)
_RULES = [item for family in _FAMILIES for item in vars(family).values() if isinstance(item, Rule)]

ALL_RULES: tuple[Rule, ...] = tuple(sorted(_RULES, key=lambda rule: SETTING_NAMES.index(rule.setting)))
