"""Hugging Face's Trainer with its defaults: padded to the longest, to a fixed length, or fixed and compiled."""

import tempfile
from typing import Any

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload, Repeated


class GateCallback(TrainerCallback):
    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self.loss: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._gate.step(self.loss)


class InOrder(Trainer):
    """Without shuffling, and with access to the loss of each step."""

    gate_callback: GateCallback

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *given: Any, **named: Any) -> Any:
        self.gate_callback.loss = super().training_step(*given, **named)
        return self.gate_callback.loss


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
    is_fixed = spec.loop != "trainer" and workload.collate_fixed is not None
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=workload.batch,
            max_steps=spec.total_steps,
            learning_rate=workload.lr,
            weight_decay=0.0,
            lr_scheduler_type="linear",
            max_grad_norm=workload.clip,
            bf16=spec.is_half,
            use_cpu=spec.device == "cpu",
            dataloader_num_workers=spec.workers,
            dataloader_persistent_workers=spec.workers > 0,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            torch_compile=spec.is_compiled,
        )
        callback = GateCallback(gate)
        trainer = InOrder(
            model=workload.model,
            args=arguments,
            train_dataset=Repeated(workload, total_steps=spec.total_steps),
            data_collator=workload.collate_fixed if is_fixed else workload.collate,
            callbacks=[callback],
        )
        trainer.gate_callback = callback
        trainer.train()
        gate.end()
