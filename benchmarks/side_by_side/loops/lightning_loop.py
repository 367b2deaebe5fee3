"""Lightning's Trainer without logger, progress bar and checkpoints."""

import warnings
from typing import Any

import lightning
import torch
from torch import Tensor

from side_by_side.loops.common import adamw, linear, loader
from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate
from side_by_side.workload import PeerWorkload


class Module(lightning.LightningModule):
    def __init__(self, workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
        super().__init__()
        self._workload, self._gate, self._spec = workload, gate, spec
        self.model = workload.model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self._loss: Tensor = self.model(**batch)["loss"]
        return self._loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.model, self._workload, fused=self._spec.device == "cuda")
        schedule = linear(optimizer, self._spec)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, _: Any) -> None:
        # gradient_clip_val does not work with fused optimizers, which are faster.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._workload.clip)

    def on_train_batch_end(self, *_: Any) -> None:
        self._gate.step(self._loss)


def run(workload: PeerWorkload, gate: StepGate, spec: Spec) -> None:
    gate.begin()
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
    trainer.fit(Module(workload, gate, spec), loader(workload, spec))
    gate.end()
