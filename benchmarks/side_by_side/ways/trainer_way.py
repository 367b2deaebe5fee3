"""Hugging Face's Trainer with its defaults: padded to the longest, to one length, or to one length and compiled."""

import tempfile
from typing import Any

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.work import Repeated, Work


class Told(TrainerCallback):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.loss: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._pace.step(self.loss)


class InOrder(Trainer):
    """Without a shuffle, and with the loss of each step at hand."""

    told: Told

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *given: Any, **named: Any) -> Any:
        self.told.loss = super().training_step(*given, **named)
        return self.told.loss


def run(work: Work, pace: Pace, spec: Spec) -> None:
    pace.begin()
    is_fixed = spec.way != "trainer" and work.collate_fixed is not None
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.batch,
            max_steps=spec.total_steps,
            learning_rate=work.lr,
            weight_decay=0.0,
            lr_scheduler_type="linear",
            max_grad_norm=work.clip,
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
        told = Told(pace)
        trainer = InOrder(
            model=work.model,
            args=arguments,
            train_dataset=Repeated(work, total_steps=spec.total_steps),
            data_collator=work.collate_fixed if is_fixed else work.collate,
            callbacks=[told],
        )
        trainer.told = told
        trainer.train()
        pace.end()
