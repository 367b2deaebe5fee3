"""The @rule decorator: rules are functions that decide one setting, and their docstrings become pages in docs/rules/.

The docstring of a rule has a fixed form: a first line that describes the setting, then the sections Why, When wrong,
Override and Sources.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whet.machine.facts import Accelerator, Machine, SystemState
from whet.plan.setting import Evidence, Scalar, Setting
from whet.plan.values import DECLARED, Constraint, SettingValues
from whet.plan.workload import Workload

SECTIONS = ("Why", "When wrong", "Override", "Sources")


@dataclass(frozen=True, kw_only=True)
class RuleContext(SettingValues):
    """The inputs of a rule: the machine, its current state, the workload, and the settings decided so far."""

    machine: Machine
    system_state: SystemState
    workload: Workload
    settings: Mapping[str, Setting]

    @property
    def device_type(self) -> str:
        """The decided device without its index, such as "cuda" for "cuda:1"."""
        return self.device.partition(":")[0]

    @property
    def num_shards(self) -> int:
        """Number of processes that weights, gradients and optimizer state are sharded over."""
        is_sharded = "sharding" in self.settings and self.sharding == "full"
        return self.workload.world_size if is_sharded else 1

    @property
    def processes_per_device(self) -> int:
        """Number of processes of this training run that share the device's memory."""
        local = self.workload.local_size
        if self.device_type == "cpu":
            return local
        # If there are more processes than devices, several processes share the memory of one device.
        count = sum(accelerator.kind == self.device_type for accelerator in self.machine.accelerators)
        return -(-local // max(1, count))

    @property
    def accelerator(self) -> Accelerator | None:
        """Facts about the decided device, or None for the CPU."""
        return self.machine.accelerator(self.device_type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The value that a rule chooses, with its reason and evidence."""

    value: Scalar
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: the setting it decides, its function and its documentation."""

    id: str
    setting: str
    decide: Callable[[RuleContext], Decision]
    what: str
    sections: Mapping[str, str]

    @property
    def constraint(self) -> Constraint:
        """The values that the setting may have."""
        return DECLARED[self.setting].constraint


def rule(rule_id: str, setting: str) -> Callable[[Callable[[RuleContext], Decision]], Rule]:
    """Return a decorator that turns a documented function into the rule for `setting`."""

    def make(decide: Callable[[RuleContext], Decision]) -> Rule:
        what, sections = _parse_docstring(inspect.getdoc(decide) or "")
        # Check at import, so that an incomplete rule fails every test, not only the test of the docs.
        missing = [name for name in SECTIONS if not sections.get(name)]
        assert setting in DECLARED, f"rule {rule_id}: declare {setting} in plan/values.py"
        assert what, f"rule {rule_id} needs a first line"
        assert not missing, f"rule {rule_id} needs the sections {missing}"
        return Rule(id=rule_id, setting=setting, decide=decide, what=what, sections=sections)

    return make


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\s*", text, flags=re.MULTILINE)
    sections = {name: _join_lines(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    return _join_lines(parts[0]), sections


def _join_lines(body: str) -> str:
    return " ".join(body.split())
