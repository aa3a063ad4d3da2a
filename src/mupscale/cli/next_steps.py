"""What to do with a grown directory, printed when it is there."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.trainer_state import OPTIMIZER
from ..jobs.job import Job


def next_steps(base: Path, out: Path, job: Job) -> str:
    """The lines that a user types next."""
    about = job.about
    lines = [f"written: {out}   ({about['architecture']}, {about['parameters']['wide']:,} parameters)", ""]
    if about["noise"] is None:
        lines += [
            "It trains exactly like the base, and cannot use its new width until noise is added:",
            f"  mupscale upscale {base} {out}-noisy -k {about['multipliers']} --noise t=0.2",
            "",
        ]
    stated = any(file.name == OPTIMIZER for file in job.files)
    if stated:
        lines += [
            "To go on with the stock Trainer, its optimizer state and its schedule:",
            f'  trainer = Trainer(..., callbacks=[mu.HuggingFaceCallback("{out}")])',
            f'  trainer.train(resume_from_checkpoint="{out}")',
            "",
        ]
    lines += [
        f"To {'start with a fresh optimizer' if stated else 'train it'} (lr as you would give the base):",
        "  import mupscale as mu, torch, transformers",
        f'  model = transformers.{about["architecture"]}.from_pretrained("{out}")',
        f'  optimizer = mu.optimizer_for(model, "{out}", torch.optim.AdamW, lr=…)',
        "",
        "To prove what was written:",
        f"  mupscale check {base} {out}",
    ]
    return "\n".join(lines)
