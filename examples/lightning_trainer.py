"""Lightning trains a module, its checkpoint is grown, and `trainer.fit(ckpt_path=...)` continues from it.

    python examples/lightning_trainer.py

Weights and optimizer state get their new units in the file; the callback gives the steps theirs. Schedule and clipping
are those of the base, and so are the losses. The control is the same run without the callback.
"""

import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mupscale as mu

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
STOP, END, BATCH = 20, 40, 32
X = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
Y = torch.sin(2 * X[:, :1]) * X[:, 1:2]


def make(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )


class Module(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.model, self.losses = make(width), []

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        # A resumed epoch begins at its first row again, so the rows are chosen by the step.
        rows = (self.trainer.global_step * BATCH + torch.arange(BATCH)) % len(X)
        loss = (self.model(X[rows]) - Y[rows]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, END, eta_min=1e-4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(width: int, stop: int, resume: Path | None = None, callback: L.Callback | None = None) -> L.Trainer:
    talk = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False
    )
    trainer = L.Trainer(max_steps=stop, accelerator="cpu", gradient_clip_val=0.3, callbacks=callback, **talk)
    trainer.fit(Module(width), DataLoader(TensorDataset(X, Y), batch_size=BATCH), ckpt_path=resume)
    return trainer


with tempfile.TemporaryDirectory() as room:
    narrow, wide = Path(room, "base.ckpt"), Path(room, "wide.ckpt")
    fit(16, STOP).save_checkpoint(narrow)
    mu.grow_checkpoint(narrow, wide, plan=mu.plans.plan_between(make, 16, 64))
    runs = fit(16, END, narrow), fit(64, END, wide, mu.trainers.LightningCallback(wide)), fit(64, END, wide)
base, grown, control = (trainer.lightning_module.losses for trainer in runs)

print(f"step {'base':>12} {'wide':>12} {'no callback':>12}")
for step, losses in enumerate(zip(base, grown, control, strict=True), STOP):
    print(f"{step:4}" + "".join(f" {loss:12.8f}" for loss in losses))
gaps = [max(abs(a - b) / a for a, b in zip(base, run, strict=True)) for run in (grown, control)]
print(f"largest relative difference {gaps[0]:.1e}; without the callback {gaps[1]:.1e}")
assert len(base) == END - STOP
assert gaps[0] < 1e-5 < 1e-3 < gaps[1]
