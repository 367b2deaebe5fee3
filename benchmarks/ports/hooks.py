"""Hooks in the two loops: record what a ported run does, and replay it in the original loop.

No script is changed for them. whet has its own order of samples, and a DataLoader draws from torch's generator even if
it does not shuffle. So the original loop is given the samples of the ported one, and the generator before each step.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from ports.record import BatchRecord, PortRecord, named_tensors
from whet.checkpoint.store import checkpoint_name
from whet.data.batch import GlobalBatch, Position
from whet.data.order import collate_seed, sample_seed
from whet.data.sample import seeded_rng
from whet.device.random_streams import RandomStreams
from whet.training.callback import Action, CallbackList
from whet.training.progress import State
from whet.training.run_config import RunConfig
from whet.training.session import Session


class PortRecorder:
    """Records the steps of the session of a ported script, and can stop it at a step."""

    def __init__(self, path: Path, *, stop: tuple[int, int] | None = None, save_at: int | None = None) -> None:
        """Record to `path`. `stop` is a step and the signal that this process sends itself after it."""
        self.record = PortRecord()
        self._path, self._stop, self._save_at = path, stop, save_at
        self._run_path: Path | None = None

    def install(self) -> None:
        """Wrap the methods of Session."""
        recorder, step, manual, leave = self, Session.step, Session.manual, Session.__exit__
        use_config = Session._use_config
        after_step, enter_step = CallbackList.after_step, RandomStreams.enter_step

        def keep_kernels(session: Session, config: RunConfig) -> None:
            # The original has the kernels of its own optimizer. Others round differently.
            use_config(session, replace(config, overrides={**config.overrides, "optimizer_kernels": "yours"}))

        def record_step(session: Session, loss: Any, batch: GlobalBatch, **options: Any) -> None:
            recorder.begin(session, batch)
            step(session, loss, batch, **options)

        def record_manual(session: Session, batch: GlobalBatch) -> AbstractContextManager[Any]:
            recorder.begin(session, batch)
            return manual(session, batch)

        def record_rng(streams: RandomStreams) -> None:
            enter_step(streams)
            recorder.add_rng()

        def record_loss(callbacks: CallbackList, state: State, outcome: Any) -> Action:
            recorder.record.losses.append(float(outcome.loss))
            return after_step(callbacks, state, outcome) | recorder.end(state)

        def record_exit(session: Session, kind: Any, error: Any, at: Any) -> None:
            leave(session, kind, error, at)
            if error is None:
                recorder.save(session)

        Session._use_config = keep_kernels  # type: ignore[method-assign]
        Session.step = record_step  # type: ignore[method-assign]
        Session.manual = record_manual  # type: ignore[method-assign]
        Session.__exit__ = record_exit  # type: ignore[method-assign]
        CallbackList.after_step = record_loss  # type: ignore[method-assign]
        RandomStreams.enter_step = record_rng  # type: ignore[method-assign]

    def begin(self, session: Session, batch: GlobalBatch) -> None:
        """Record the samples of a step."""
        record, epoch = self.record, session.state.epoch
        after = (batch.after.epoch, batch.after.samples)
        if not record.batches:
            data = session.config.data
            record.seed, record.first_step = session.training.seed, session.state.step
            record.dataset_size = len(data.dataset) if isinstance(data, DataLoader) else None  # type: ignore[arg-type]
            self._run_path = session.run.path
        elif record.batches[-1].after == after:
            # Another optimizer steps on the same batch.
            return
        record.batches.append(BatchRecord(ids=batch.ids.tolist(), epoch=epoch, after=after))

    def add_rng(self) -> None:
        """Record the state of the generator at the beginning of a step, which code between steps does not move."""
        if len(self.record.rng) < len(self.record.batches):
            self.record.rng.append(torch.get_rng_state())

    def end(self, state: State) -> Action:
        """Ask for a checkpoint, or stop this process, if it is the step for it."""
        if self._stop is not None and state.step == self._stop[0]:
            if self._save_at is not None:
                self._await_checkpoint()
            os.kill(os.getpid(), self._stop[1])
        return Action.SAVE if state.step == self._save_at else Action.NONE

    def _await_checkpoint(self) -> None:
        """Wait for the checkpoint, which a thread writes: the steps here take milliseconds."""
        assert self._run_path is not None
        assert self._save_at is not None
        path, deadline = self._run_path / "checkpoints" / checkpoint_name(self._save_at), time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    def save(self, session: Session) -> None:
        """Write the record, with the final weights."""
        optimizers = session.config.optimizers.torch_optimizers
        parameters = list(session.model.parameters())
        self.record.tensors = {
            **dict(named_tensors(parameters, "parameters")),
            **dict(named_tensors(session.model.state_dict(), "model")),
            **dict(named_tensors({name: each.state_dict()["state"] for name, each in optimizers.items()}, "optimizer")),
        }
        self.record.save(self._path)
        if self._stop is not None:
            # What a script does after the training is the same as after a whole run.
            sys.exit(128 + signal.SIGINT)


class Replayer:
    """Gives an original loop the samples and the generator of a recorded run, and records its losses."""

    def __init__(self, recorded: PortRecord, *, num_backwards: int) -> None:
        self.record = PortRecord()
        self._recorded, self._num_backwards = recorded, num_backwards
        self._num_calls, self._epoch = 0, 0
        self._is_new_step = True
        self._models: list[nn.Module] = []

    def install(self) -> None:
        """Wrap Tensor.backward and DataLoader.__iter__, and hook into forward passes."""
        replayer, backward, iterate = self, torch.Tensor.backward, DataLoader.__iter__

        def record_backward(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
            backward(loss, *arguments, **options)
            replayer.count(float(loss.detach()))

        def replay_batches(loader: DataLoader[Any]) -> Iterator[Any]:
            if len(loader.dataset) != replayer._recorded.dataset_size:  # type: ignore[arg-type]
                return iterate(loader)
            return replayer.batches(loader)

        torch.Tensor.backward = record_backward  # type: ignore[method-assign, assignment]
        DataLoader.__iter__ = replay_batches  # type: ignore[method-assign, assignment]
        register_module_forward_pre_hook(self.before_forward)

    def count(self, loss: float) -> None:
        """Add a loss to those of the step."""
        if self._num_calls % self._num_backwards == 0:
            self.record.losses.append(0.0)
        self.record.losses[-1] += loss
        self._num_calls += 1
        self._is_new_step = self._num_calls % self._num_backwards == 0

    def before_forward(self, module: nn.Module, _arguments: Any) -> None:
        """Set the generator before the first forward pass of a step."""
        has_weights = next(module.parameters(), None) is not None
        if not module.training or not has_weights or not torch.is_grad_enabled():
            return
        step = self._num_calls // self._num_backwards
        if self._is_new_step and step < len(self._recorded.rng):
            torch.set_rng_state(self._recorded.rng[step])
            self._is_new_step = False
        if step == 0 and not any(module in model.modules() for model in self._models):
            self._models.append(module)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the recorded batches of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        recorded = [batch for batch in self._recorded.batches if batch.epoch == epoch]
        if not recorded:
            raise SystemExit("all recorded steps are done")
        for batch in recorded:
            # A loop that accumulates gradients reads a global batch in parts.
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", len(batch.ids))
            for start in range(0, len(batch.ids), size):
                yield self._read(loader, replace(batch, ids=batch.ids[start : start + size]))

    def _read(self, loader: DataLoader[Any], batch: BatchRecord) -> Any:
        seed, samples = self._recorded.seed, []
        for sample in batch.ids:
            with seeded_rng(sample_seed(seed, batch.epoch, sample)):
                samples.append(loader.dataset[sample])
        position = Position(epoch=batch.after[0], samples=batch.after[1])
        with seeded_rng(collate_seed(seed, batch.epoch, position)):
            return loader.collate_fn(samples)

    def save(self, path: Path) -> None:
        """Write the losses and the final parameters."""
        parameters = [tensor for model in self._models for tensor in model.parameters()]
        self.record.tensors = dict(named_tensors(parameters, "parameters"))
        self.record.save(path)
