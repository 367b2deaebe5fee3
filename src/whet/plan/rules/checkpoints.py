"""When a run is saved, and what is kept."""

from whet.plan.rule import POSITIVE, Decision, RuleContext, integer, rule

_MINUTES = 5
_KEEP = 2


@rule("C1", "checkpoint_minutes", POSITIVE)
def choose_checkpoint_minutes(facts: RuleContext) -> Decision:
    """After how many minutes a checkpoint is written, at the soonest.

    Why: the interval that loses least is about sqrt(2 x cost of a save x time between interruptions); for a save of
    half a second and one interruption a day that is 5 minutes. While the run trains, the cost of each save is measured
    (the time the training stood still, and how much slower steps were beside it), and the interval grows to that root
    where it is longer, and to 100 times the cost, so that saving takes at most 1 % of the time.
    When wrong: machines that are taken away without notice; a disk that must be spared more.
    Override: checkpoint_minutes=N, checkpoint_steps=N or checkpoint_epochs=N; what you set is kept, whatever it costs.
    Sources: Young 1974, Daly 2006; cost of saves measured on a 2-core machine.
    """
    return Decision(
        value=_MINUTES,
        reason="the least loss for a short save and one interruption a day",
        evidence={"static_bytes": facts.workload.static_bytes},
    )


@rule("C2", "checkpoint_steps", integer(1))
def choose_checkpoint_steps(facts: RuleContext) -> Decision:
    """After how many optimizer steps a checkpoint is written, beside the minutes.

    Why: a step says nothing about the time at risk, so time decides unless you say otherwise.
    When wrong: when checkpoints must lie at fixed steps, for comparing runs.
    Override: checkpoint_steps=N.
    Sources: as C1.
    """
    return Decision(value=None, reason="time decides", evidence={"num_steps": facts.workload.num_steps})


@rule("C3", "checkpoint_epochs", integer(1))
def choose_checkpoint_epochs(facts: RuleContext) -> Decision:
    """After how many epochs a checkpoint is written, beside the minutes.

    Why: an epoch may take a second or a day, so time decides unless you say otherwise.
    When wrong: when the state at epoch ends is wanted.
    Override: checkpoint_epochs=N.
    Sources: as C1.
    """
    return Decision(value=None, reason="time decides", evidence={"num_samples": facts.workload.num_samples})


@rule("C4", "keep", integer(2))
def choose_keep(facts: RuleContext) -> Decision:
    """How many of the last checkpoints are kept, beside the best one and two milestones.

    Why: two, never one: while one is being replaced the other is whole. The milestones are the first checkpoints of
    the two newest tenths of a run of 100 steps or more, for a run that has gone wrong; they go first when the disk is
    nearly full.
    When wrong: little disk space, or when a run may have to go back far.
    Override: keep=N, 2 or more.
    Sources: torchtitan refuses 1 for the same reason.
    """
    return Decision(
        value=_KEEP,
        reason="one is whole while the other is written",
        evidence={"static_bytes": facts.workload.static_bytes},
    )


RULES = (choose_checkpoint_minutes, choose_checkpoint_steps, choose_checkpoint_epochs, choose_keep)
