"""Rules for when a run is saved, and how many checkpoints are kept."""

from whet.plan.rule import Decision, RuleContext, rule

# Young's formula for a save of half a second and one interruption a day.
_MINUTES = 5
# Never one: while a checkpoint is being replaced, another one must be complete.
_KEEP = 2


@rule("C1", "checkpoint_minutes")
def choose_checkpoint_minutes(context: RuleContext) -> Decision:
    """The minimum number of minutes between checkpoints.

    Why: the interval that loses least is about sqrt(2 x cost of a save x time between interruptions); for a save of
    half a second and one interruption a day that is 5 minutes. While the run trains, the cost of each save is measured
    (how long training stopped, and how much slower the steps beside it were). The interval grows to that root
    where it is longer, and to 100 times the cost, so that saving takes at most 1 % of the time.
    When wrong: machines that are preempted without notice; a disk that must be spared.
    Override: checkpoint_minutes=N, checkpoint_steps=N or checkpoint_epochs=N; a slow save does not change your value.
    Sources: Young 1974, Daly 2006; cost of saves measured on a 2-core machine.
    """
    return Decision(
        value=_MINUTES,
        reason="the least loss for a short save and one interruption a day",
        evidence={"static_bytes": context.workload.static_bytes},
    )


@rule("C2", "checkpoint_steps")
def choose_checkpoint_steps(context: RuleContext) -> Decision:
    """The number of optimizer steps between checkpoints, in addition to the minutes.

    Why: a number of steps says nothing about the time at risk, so time decides by default.
    When wrong: when checkpoints must be at fixed steps, for comparing runs.
    Override: checkpoint_steps=N.
    Sources: as C1.
    """
    return Decision(value=None, reason="time decides", evidence={"num_steps": context.workload.num_steps})


@rule("C3", "checkpoint_epochs")
def choose_checkpoint_epochs(context: RuleContext) -> Decision:
    """The number of epochs between checkpoints, in addition to the minutes.

    Why: an epoch may take a second or a day, so time decides by default.
    When wrong: when the state at the end of epochs is needed.
    Override: checkpoint_epochs=N.
    Sources: as C1.
    """
    return Decision(value=None, reason="time decides", evidence={"num_samples": context.workload.num_samples})


@rule("C4", "keep")
def choose_keep(context: RuleContext) -> Decision:
    """Number of last checkpoints that are kept, in addition to the best one and two milestones.

    Why: two, never one: while one is being replaced, the other is complete. The milestones are the first checkpoints of
    the two newest tenths of a run of 100 steps or more, for a run that went wrong; they are deleted first when the disk
    is nearly full.
    When wrong: little disk space, or when a run may have to roll back far.
    Override: keep=N, 2 or more.
    Sources: torchtitan rejects 1 for the same reason.
    """
    return Decision(
        value=_KEEP,
        reason="one is complete while the other is written",
        evidence={"static_bytes": context.workload.static_bytes},
    )
