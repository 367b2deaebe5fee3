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
from whet.plan.workload import Workload

SECTIONS = ("Why", "When wrong", "Override", "Sources")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that a rule may look at: the machine, its moment, the workload, and what was decided before."""

    machine: Machine
    conditions: Conditions
    workload: Workload
    decided: Mapping[str, Setting]

    def value(self, name: str) -> Scalar:
        """The value of a setting that was decided before."""
        return self.decided[name].value

    @property
    def device(self) -> str:
        """The kind of the decided device, without an index: "cuda:1" is "cuda"."""
        return str(self.value("device")).partition(":")[0]

    @property
    def num_parts(self) -> int:
        """By how many processes weights, gradients and state are divided; an older plan knows nothing of it."""
        sharding = self.decided.get("sharding")
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
class Law:
    """What a setting's value may be, in words and as a test."""

    text: str
    holds: Callable[[Scalar], bool]


def one_of(*values: Scalar) -> Law:
    """One of a few words."""
    return Law(text=" or ".join(map(str, values)), holds=lambda value: value in values)


def whole(least: int, most: int = 2**53) -> Law:
    """A whole number."""
    return Law(
        text=f"a whole number, {least} or more" if most == 2**53 else f"a whole number from {least} to {most}",
        holds=lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


POSITIVE = Law(
    text="a number above 0",
    holds=lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: what it decides, how, and its page."""

    id: str
    setting: str
    law: Law
    decide: Callable[[Facts], Decision]
    what: str
    sections: Mapping[str, str]


def rule(rule_id: str, setting: str, law: Law) -> Callable[[Callable[[Facts], Decision]], Rule]:
    """Turns a documented function into the rule that decides `setting`."""

    def make(decide: Callable[[Facts], Decision]) -> Rule:
        what, sections = _read_page(inspect.getdoc(decide) or "")
        missing = [name for name in SECTIONS if not sections.get(name)]
        assert what, f"rule {rule_id} needs a first line"
        assert not missing, f"rule {rule_id} needs the sections {missing}"
        return Rule(id=rule_id, setting=setting, law=law, decide=decide, what=what, sections=sections)

    return make


def _read_page(text: str) -> tuple[str, dict[str, str]]:
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\s*", text, flags=re.MULTILINE)
    sections = {name: _join(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    return _join(parts[0]), sections


def _join(body: str) -> str:
    return " ".join(body.split())
