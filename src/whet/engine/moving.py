"""Does a model compute the same on the device that a run has moved to? One micro-batch tells, there and on the CPU."""

from dataclasses import dataclass

from whet.checkpoint.randomness import undisturbed
from whet.data.batch import Micro
from whet.device.cpu import Cpu
from whet.engine.guard import Buffers
from whet.step.loss import LossFunction, split_loss
from whet.step.step import Stepper

TOLERANCE = {"fp32": 1e-4}
"""By how much the loss may differ, relatively; other precisions round more."""
_COARSE = 2e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The loss of one micro-batch in two places."""

    here: float
    on_cpu: float
    tolerance: float

    @property
    def difference(self) -> float:
        return abs(self.here - self.on_cpu) / max(abs(self.on_cpu), 1e-12)

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DISAGREES"
        return f"the loss of the next batch {verdict} with the CPU's: {self.here:.7g} and {self.on_cpu:.7g}"


def compare_with_cpu(stepper: Stepper, loss: LossFunction, micro: Micro, *, precision: str) -> Comparison:
    """The loss in eval mode, here and on the CPU; model, buffers and generators are as before afterwards."""
    model, device, cpu = stepper.model, stepper.device, Cpu()
    modes = [(module, module.training) for module in model.modules()]
    buffers = Buffers(model)
    try:
        model.eval()
        with undisturbed(device):
            here = _loss_value(loss, micro.moved(device.put), precision=precision, stepper=stepper)
            model.to(cpu.place)
            on_cpu = _loss_value(loss, micro.moved(cpu.put), precision="fp32", stepper=stepper)
    finally:
        model.to(device.place)
        buffers.put_back()
        for module, mode in modes:
            module.training = mode
    return Comparison(here=here, on_cpu=on_cpu, tolerance=TOLERANCE.get(precision, _COARSE))


def _loss_value(loss: LossFunction, micro: Micro, *, precision: str, stepper: Stepper) -> float:
    with stepper.device.autocast(precision):
        total, weight = split_loss(loss(micro))
    return float(total.detach()) if weight is None else float(total.detach()) / max(float(weight), 1e-12)
