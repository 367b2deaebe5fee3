"""How a run treats the machine it runs on."""

from whet.plan.rule import Decision, RuleContext, one_of, rule


@rule("H1", "on_heat", one_of("warn", "pace", "pause"))
def choose_on_heat(facts: RuleContext) -> Decision:
    """What happens when the machine gets hot and slow: say so, rest a share of the time, or pause until it is cool.

    Why: a hot machine slows itself down and comes to no harm; whether it should rest is a matter of noise, lap and
    battery, and so yours. No choice changes what is trained: whet only waits between steps.
    When wrong: a laptop without a fan on a long run. `pace` rests 20 % of the time and more until it is cool enough;
    `pause` saves, and waits until the sensor is back to normal (two minutes where there is no sensor, 15 at most).
    Override: on_heat=pace or on_heat=pause, also when a run goes on; epochs_per_sitting=2 trains two epochs at a time.
    Sources: public advice (2 to 3 epochs at a time, with breaks); OSThermalNotification.h; ggml-org/llama.cpp#16634.
    """
    is_fanless = facts.machine.is_fanless
    reason = "no fan: on_heat=pace would keep it cooler" if is_fanless else "waiting costs time, and heat does no harm"
    return Decision(value="warn", reason=reason, evidence={"is_fanless": is_fanless})


RULES = (choose_on_heat,)
