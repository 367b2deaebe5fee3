"""Rules for the device, and for how a run treats the machine."""

import re

from whet.plan.rule import Constraint, Decision, RuleContext, one_of, rule

DEVICE_NAME = Constraint(
    text="auto, mps, cuda, cuda:1 or cpu",
    holds=lambda value: isinstance(value, str) and re.fullmatch(r"mps|cpu|cuda(:\d+)?", value) is not None,
)


@rule("D1", "device", DEVICE_NAME)
def choose_device(facts: RuleContext) -> Decision:
    """The device that computes: CUDA, else MPS, else the CPU.

    Why: a GPU is usually the fastest device of a machine, and CUDA has the more complete and better tested kernels
    where a machine has both.
    When wrong: small models, recurrent cells and per-sample loops can be faster on the CPU (a GRU cell took 249 us on
    MPS against 117 us on the CPU of an M3 Max). Only a measurement on your model can tell.
    Override: --device mps, --device cuda:1 or --device cpu.
    Sources: pytorch/pytorch#138898, #77799.
    """
    machine = facts.machine
    kinds = tuple(a.kind for a in machine.accelerators)
    evidence = {"available": (*kinds, "cpu")}
    for kind, praise in (("cuda", "an NVIDIA GPU"), ("mps", "the Apple GPU")):
        accelerator = machine.accelerator(kind)
        if accelerator is not None:
            return Decision(value=kind, reason=f"{accelerator.name or praise} is there", evidence=evidence)
    why = "; ".join(f"no {a.device}: {a.reason}" for a in machine.absent) or "no GPU is known here"
    return Decision(value="cpu", reason=why, evidence=evidence)


@rule("D2", "on_device_failure", one_of("stop", "cpu"))
def choose_on_device_failure(facts: RuleContext) -> Decision:
    """What happens when the chosen device cannot be used: stop, or go on with the CPU.

    Why: a silent move to the CPU hides a slow-down of ten times and more. It is stated, or it does not happen.
    When wrong: an unattended run that must end, however late.
    Override: on_device_failure=cpu; the move is one line on the screen and one event.
    Sources: accelerate falls back without saying so.
    """
    return Decision(value="stop", reason="a silent fall-back would hide a slow run", evidence={"device": facts.device})


@rule("D3", "mps_fallback", one_of("off", "on"))
def choose_mps_fallback(facts: RuleContext) -> Decision:
    """Whether operators that MPS lacks run on the CPU instead of failing.

    Why: each one costs a GPU synchronisation and two copies per call, says so once at most, and does not cover
    float64 or unsupported shapes. An operator that is missing should be seen before the run.
    When wrong: a model that needs one rare operator and is still faster with the round trip.
    Override: mps_fallback=on; `whet train` sets it before torch starts. In a script of yours set
    PYTORCH_ENABLE_MPS_FALLBACK=1 yourself. The report then names the operators that fell back, with what they cost in
    the first two steps.
    Sources: ATen/mps/MPSFallback.mm (torch 2.13); pytorch/pytorch#105382, #173808.
    """
    if facts.device != "mps":
        return Decision(value="off", reason="only MPS has it", evidence={"device": facts.device})
    return Decision(value="off", reason="it hides slow trips to the CPU", evidence={"device": "mps"})


@rule("D4", "keep_awake", one_of("on", "off", "unused"))
def choose_keep_awake(facts: RuleContext) -> Decision:
    """Whether the machine is kept from falling asleep while it trains.

    Why: a Mac that nobody touches sleeps after some minutes, and a run with it. `caffeinate -i -w PID` prevents that
    as long as the run's process lives, a killed one included; the display may still go dark. A closed lid, an empty
    battery and the power button are stronger.
    When wrong: on a battery that is needed for something else.
    Override: keep_awake=off.
    Sources: caffeinate(8), macOS.
    """
    system = facts.machine.os.name
    if system != "macOS":
        return Decision(value="unused", reason="only macOS has caffeinate", evidence={"os": system})
    return Decision(value="on", reason="a Mac that nobody touches falls asleep", evidence={"os": system})


RULES = (choose_device, choose_on_device_failure, choose_mps_fallback, choose_keep_awake)
