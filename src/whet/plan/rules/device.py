"""Rules for the device, and for how a run treats the machine."""

from whet.plan.rule import Decision, RuleContext, rule


@rule("D1", "device")
def choose_device(context: RuleContext) -> Decision:
    """The device that training runs on: CUDA, else MPS, else the CPU.

    Why: a GPU is usually the fastest device of a machine. CUDA comes before MPS, because its kernels are more complete
    and better tested.
    When wrong: small models, recurrent cells and per-sample loops can be faster on the CPU (a GRU cell took 249 us on
    MPS and 117 us on the CPU of an M3 Max). Measure your model to find out.
    Override: --device mps, --device cuda:1 or --device cpu; in Python device="cpu".
    Sources: pytorch/pytorch#138898, #77799.
    """
    machine = context.machine
    evidence = {"available": (*(a.kind for a in machine.accelerators), "cpu")}
    for kind, description in (("cuda", "an NVIDIA GPU"), ("mps", "the Apple GPU")):
        accelerator = machine.accelerator(kind)
        if accelerator is not None:
            reason = f"{accelerator.name or description} is available"
            return Decision(value=kind, reason=reason, evidence=evidence)
    why = "; ".join(f"no {a.device}: {a.reason}" for a in machine.absent) or "no GPU is known on this machine"
    return Decision(value="cpu", reason=why, evidence=evidence)


@rule("D2", "on_device_failure")
def choose_on_device_failure(context: RuleContext) -> Decision:
    """What to do if the chosen device cannot be used: stop, or continue on the CPU.

    Why: a silent move to the CPU hides a slowdown of 10x or more, so it happens only on request.
    When wrong: an unattended run that must finish, even if it takes much longer.
    Override: on_device_failure=cpu; the move is reported on the terminal and as an event.
    Sources: accelerate falls back silently.
    """
    evidence = {"device": context.device_type}
    return Decision(value="stop", reason="a silent fallback would hide a slow run", evidence=evidence)


@rule("D3", "mps_fallback")
def choose_mps_fallback(context: RuleContext) -> Decision:
    """Whether operators that MPS lacks run on the CPU instead of failing.

    Why: each call of such an operator costs a GPU synchronization and two copies, with one warning at most. The
    fallback does not cover float64 or unsupported shapes. A missing operator should be noticed before the run.
    When wrong: a model that needs one rare operator, and is still faster on MPS with the round trip.
    Override: mps_fallback=on; `whet train` sets the variable before it imports torch. In your own script, set
    PYTORCH_ENABLE_MPS_FALLBACK=1 yourself. The report then lists the operators that fell back, with their cost in
    the first two steps.
    Sources: ATen/mps/MPSFallback.mm (torch 2.13); pytorch/pytorch#105382, #173808.
    """
    if context.device_type != "mps":
        return Decision(value="off", reason="only MPS has it", evidence={"device": context.device_type})
    return Decision(value="off", reason="it hides slow round trips to the CPU", evidence={"device": "mps"})


@rule("D4", "keep_awake")
def choose_keep_awake(context: RuleContext) -> Decision:
    """Whether the machine is kept awake during training.

    Why: an idle Mac goes to sleep after some minutes, which suspends the run. `caffeinate -i -w PID` prevents this
    until the process of the run ends, even if it is killed. The display may still turn off. A closed lid, an empty
    battery and the power button take precedence.
    When wrong: on battery power that is needed for something else.
    Override: keep_awake=off.
    Sources: caffeinate(8), macOS.
    """
    system = context.machine.os.name
    if system != "macOS":
        return Decision(value="unused", reason="only macOS has caffeinate", evidence={"os": system})
    return Decision(value="on", reason="an idle Mac falls asleep", evidence={"os": system})


@rule("H1", "on_heat")
def choose_on_heat(context: RuleContext) -> Decision:
    """What to do if heat throttles the machine: warn, slow down by resting part of the time, or pause until it is cool.

    Why: a hot machine throttles itself and is not damaged. Whether it should rest depends on noise, comfort and
    battery, so the choice is yours. No value changes what is trained, because whet only waits between steps.
    When wrong: a laptop without a fan on a long run. `slow_down` rests at least 20 % of the time until it is cool.
    `pause` saves, and waits until the sensor is back to normal (at most 15 minutes, or two without a sensor).
    Override: on_heat=slow_down or on_heat=pause, also when a run is resumed; epochs_per_session=2 trains two epochs at
    a time.
    Sources: public advice (2 to 3 epochs at a time, with breaks); OSThermalNotification.h; ggml-org/llama.cpp#16634.
    """
    is_fanless = context.machine.is_fanless
    reason = (
        "no fan: on_heat=slow_down would keep it cooler" if is_fanless else "waiting costs time, and heat does no harm"
    )
    return Decision(value="warn", reason=reason, evidence={"is_fanless": is_fanless})
