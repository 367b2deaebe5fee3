"""Rules for how often a run is saved, and how many checkpoints are kept."""

from whet.plan.rule import Decision, RuleContext, rule

# Young's formula for a save of half a second and one interruption a day.
_MINUTES = 5
# At least two, because while one checkpoint is replaced, another one must be complete.
_KEEP = 2


@rule("C1", "checkpoint_minutes")
def choose_checkpoint_minutes(context: RuleContext) -> Decision:
    """The minimum number of minutes between checkpoints, after the first few.

    Why: the interval that loses the least time is about sqrt(2 x cost of a save x time between interruptions), which is
    5 minutes for a save of half a second and one interruption a day. During the run, the cost of each save is measured:
    how long training stopped, and how much slower the steps during the save were. If the formula gives a longer
    interval for this cost, the interval grows to it. It is also at least 100 times the cost, so that saving takes at
    most 1 % of the time. The first checkpoints of a session come after 30 s, 1, 2 and 4 minutes, unless that costs more
    than 1 %: a young run that is killed, or one that is killed again and again, shall not start over.
    When wrong: machines that are preempted without notice; a disk that must be written rarely.
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

    Why: a number of steps does not bound the time that a crash can cost, so the interval is in minutes by default.
    When wrong: when checkpoints must be at fixed steps, for example to compare runs.
    Override: checkpoint_steps=N.
    Sources: see rule C1.
    """
    return Decision(value=None, reason="time decides", evidence={"num_steps": context.workload.num_steps})


@rule("C3", "checkpoint_epochs")
def choose_checkpoint_epochs(context: RuleContext) -> Decision:
    """The number of epochs between checkpoints, in addition to the minutes.

    Why: an epoch may take a second or a day, so the interval is in minutes by default.
    When wrong: when the state at the end of each epoch is needed.
    Override: checkpoint_epochs=N.
    Sources: see rule C1.
    """
    return Decision(value=None, reason="time decides", evidence={"num_samples": context.workload.num_samples})


@rule("C4", "keep_checkpoints")
def choose_keep_checkpoints(context: RuleContext) -> Decision:
    """Number of latest checkpoints to keep, in addition to the best one and two milestones.

    Why: with two, one is always complete while the other is replaced. Milestones are older checkpoints for the case
    that a run went wrong: in a run of 100 steps or more, the first checkpoint of each of the two newest tenths. They
    are deleted first when the disk is nearly full.
    When wrong: little disk space, or a run that may have to roll back far.
    Override: keep_checkpoints=N, 2 or more.
    Sources: torchtitan rejects 1 for the same reason.
    """
    return Decision(
        value=_KEEP,
        reason="one is complete while the other is written",
        evidence={"static_bytes": context.workload.static_bytes},
    )
