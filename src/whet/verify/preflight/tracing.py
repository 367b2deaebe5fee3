"""How is a step traced? The model is made, trained and updated among fake tensors, or for real with a few samples."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from whet.data.batch import Micro
from whet.device.branches import StandIn, branches_of
from whet.step.optimizer import make_optimizer
from whet.step.step import Stepper
from whet.verify.answering import Answers, fake_mode
from whet.verify.preflight.recorder import Recorder
from whet.verify.preflight.watcher import Watcher
from whet.verify.subject import Specimen, Subject
from whet.verify.untouched import uncompiled

BACKENDS = {"mps": "MPS", "cuda": "CUDA", "cpu": "CPU"}
_FEW_SAMPLES = 2
_LONG_STEP = 3_000
"""Operators; after a longer step only the update is made a second time."""
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What was run, and how far it came."""

    recorder: Recorder
    specimen: Specimen | None
    micro: Micro | None
    is_fake: bool
    error: Exception | None = None
    """What stopped it."""

    @property
    def num_weights(self) -> int:
        return 0 if self.specimen is None else sum(p.numel() for p in self.specimen.model.parameters())


def trace(
    subject: Subject,
    watchers: Sequence[Watcher],
    *,
    device: str,
    size: int | None = None,
    is_fake: bool = True,
    truth: bool = False,
) -> Traced:
    """Makes the model anew and two optimizer steps with it, as the device would; `truth` answers conditions.

    `size` samples go through at once, or as many as a usual step has.
    """
    mode = fake_mode() if is_fake else None
    recorder = Recorder(watchers, backend=BACKENDS[device], answers=Answers(mode, truth=truth))
    specimen, micro, error = None, None, None
    with undisturbed_trace():
        try:
            with mode or contextlib.nullcontext(), recorder:
                specimen = subject.make()
            # Data of a recipe is real: it is read among real tensors, and turned into fake ones then.
            usual = size if size is not None and specimen.is_scalable else specimen.size
            few = usual if is_fake or not specimen.is_scalable else min(usual, _FEW_SAMPLES)
            micro = specimen.micro(few)
            # Real ones are copied: a model may write to its inputs.
            micro = micro.moved(torch.clone if mode is None else mode.from_tensor)
            with mode or contextlib.nullcontext(), branches_of(device):
                _train(specimen, micro, recorder, device=device)
        except Exception as raised:
            error = raised
    return Traced(recorder=recorder, specimen=specimen, micro=micro, is_fake=is_fake, error=error)


def _train(specimen: Specimen, micro: Micro, recorder: Recorder, *, device: str) -> None:
    """Two optimizer steps: what an optimizer keeps is there only from the second one on."""
    place = StandIn(device)
    model: nn.Module = specimen.model.train()
    optimizer = make_optimizer(specimen.optimizer, model, place)
    stepper = Stepper(model, optimizer, place)

    def updating(*_: object) -> None:
        recorder.phase = "updating"

    def training(*_: object) -> None:
        recorder.phase = "training"

    optimizer.register_step_pre_hook(updating)
    optimizer.register_step_post_hook(training)
    with recorder.function_mode(), recorder:
        training()
        stepper(specimen.loss, [micro], num_samples=len(micro), step=1)
        is_long = recorder.num_calls > _LONG_STEP
        recorder.notebook.step = 1
        if is_long:
            optimizer.step()
        else:
            stepper(specimen.loss, [micro], num_samples=len(micro), step=2)


@contextlib.contextmanager
def undisturbed_trace() -> Iterator[None]:
    """Torch's generator is left as it was, and warnings of the trace itself are not the user's.

    What is compiled runs as it is written: the compiler would compile the trace.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _silent(_FAKE_LOG), uncompiled():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def _silent(log: logging.Logger) -> Iterator[None]:
    """Where fake tensors cannot go on torch prints a traceback; it is not the last word."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
