"""What a rule is: a function from facts to a decision, whose docstring is its page in the docs.

A rule's docstring has a fixed form: one line that says what is decided, then the sections Why, When wrong,
Override and Sources. `docs/rules/` is generated from it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whet.machine.facts import Accelerator, Conditions, Machine
from whet.plan.setting import Evidence, Scalar, Setting
from whet.plan.values import SettingValues
from whet.plan.workload import Workload

SECTIONS = ("Why", "When wrong", "Override", "Sources")


@dataclass(frozen=True, kw_only=True)
class RuleContext(SettingValues):
    """All that a rule may look at: the machine, its moment, the workload, and what was decided before."""

    machine: Machine
    conditions: Conditions
    workload: Workload
    settings: Mapping[str, Setting]
    """The settings decided so far."""

    @property
    def device_name(self) -> str:
        """The decided device, with its index if it has one: "cuda:1"."""
        return str(self.settings["device"].value)

    @property
    def device(self) -> str:  # type: ignore[override]
        """The kind of the decided device, without an index: "cuda:1" is "cuda"."""
        return self.device_name.partition(":")[0]

    @property
    def num_parts(self) -> int:
        """By how many processes weights, gradients and state are divided; an older plan knows nothing of it."""
        sharding = self.settings.get("sharding")
        return self.workload.world_size if sharding is not None and sharding.value == "full" else 1

    @property
    def processes_per_device(self) -> int:
        """How many processes of this training share the device's memory."""
        local = self.workload.local_size
        if self.device == "cpu":
            return local
        number = sum(accelerator.kind == self.device for accelerator in self.machine.accelerators)
        return -(-local // max(1, number))

    @property
    def accelerator(self) -> Accelerator | None:
        """The decided device's facts; None on the CPU."""
        return self.machine.accelerator(self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    value: Scalar
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What a setting's value may be, in words and as a test."""

    text: str
    holds: Callable[[Scalar], bool]


def one_of(*values: Scalar) -> Constraint:
    """One of a few words."""
    return Constraint(text=" or ".join(map(str, values)), holds=lambda value: value in values)


def integer(least: int, most: int = 2**53) -> Constraint:
    """A whole number."""
    return Constraint(
        text=f"a whole number, {least} or more" if most == 2**53 else f"a whole number from {least} to {most}",
        holds=lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


POSITIVE = Constraint(
    text="a number above 0",
    holds=lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: what it decides, how, and its page."""

    id: str
    setting: str
    law: Constraint
    decide: Callable[[RuleContext], Decision]
    what: str
    sections: Mapping[str, str]


def rule(rule_id: str, setting: str, law: Constraint) -> Callable[[Callable[[RuleContext], Decision]], Rule]:
    """Turns a documented function into the rule that decides `setting`."""

    def make(decide: Callable[[RuleContext], Decision]) -> Rule:
        what, sections = _parse_docstring(inspect.getdoc(decide) or "")
        missing = [name for name in SECTIONS if not sections.get(name)]
        assert what, f"rule {rule_id} needs a first line"
        assert not missing, f"rule {rule_id} needs the sections {missing}"
        return Rule(id=rule_id, setting=setting, law=law, decide=decide, what=what, sections=sections)

    return make


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\s*", text, flags=re.MULTILINE)
    sections = {name: _join_lines(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    return _join_lines(parts[0]), sections


def _join_lines(body: str) -> str:
    return " ".join(body.split())
