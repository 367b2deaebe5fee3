"""Lightning's Trainer, without a logger, a bar and checkpoints."""

import warnings
from typing import Any

import lightning
import torch
from torch import Tensor

from side_by_side.pace import Pace
from side_by_side.spec import Spec
from side_by_side.ways.plain import adamw, linear, loader
from side_by_side.work import Work


class Module(lightning.LightningModule):
    def __init__(self, work: Work, pace: Pace, spec: Spec) -> None:
        super().__init__()
        self._work, self._pace, self._spec = work, pace, spec
        self.model = work.model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self._loss: Tensor = self.model(**batch)["loss"]
        return self._loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.model, self._work, fused=self._spec.device == "cuda")
        schedule = linear(optimizer, self._spec)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, _: Any) -> None:
        # gradient_clip_val refuses fused kernels, which are faster.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._work.clip)

    def on_train_batch_end(self, *_: Any) -> None:
        self._pace.step(self._loss)


def run(work: Work, pace: Pace, spec: Spec) -> None:
    pace.begin()
    warnings.filterwarnings("ignore")
    trainer = lightning.Trainer(
        accelerator={"cuda": "gpu"}.get(spec.device, spec.device),
        devices=1,
        precision="bf16-mixed" if spec.is_half else "32-true",
        max_steps=spec.total_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(work, pace, spec), loader(work, spec))
    pace.end()
