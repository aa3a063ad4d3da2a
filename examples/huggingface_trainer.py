"""The stock Trainer of transformers trains a Llama, its checkpoint is grown, and the Trainer continues from it.

    python examples/huggingface_trainer.py

`mupscale grow` takes the directory that the Trainer left at step 10: weights, optimizer state, schedule. One callback
is all that the wide run needs to continue with the base's losses. The control is the same run without the callback.
"""

import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

import mupscale as mu

torch.set_num_threads(1)
logging.disable_progress_bar()
STOP, END = 10, 16


def llama(k: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32 * k, "intermediate_size": 64 * k, "num_attention_heads": 4 * k, "head_dim": 8}
    rest = {"num_key_value_heads": 2 * k, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **rest, initializer_range=0.1, tie_word_embeddings=True))


def data() -> list[dict[str, torch.Tensor]]:
    first = torch.randint(64, (128, 1), generator=torch.Generator().manual_seed(0))
    rows = (first * 5 ** torch.arange(12) + 3 * torch.arange(12)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def train(
    model: LlamaForCausalLM, folder: Path, resume: Path | None = None, *callbacks: TrainerCallback
) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=END, per_device_train_batch_size=8, save_steps=STOP, logging_steps=1,
        learning_rate=1e-2, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=4, max_grad_norm=0.3,
        adam_epsilon=1e-4, use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data(), callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-(END - STOP) :]


with tempfile.TemporaryDirectory() as name:
    room = Path(name)
    checkpoint, wide = room / "base" / f"checkpoint-{STOP}", room / "wide"
    base = train(llama(1), room / "base")
    subprocess.run(["mupscale", "grow", checkpoint, wide, "-k", "2", "--quiet"], check=True)
    grown = train(llama(2), room / "grown", wide, mu.trainers.HuggingFaceCallback(wide))
    control = train(llama(2), room / "control", wide)

print(f"\nstep {'base':>12} {'wide':>12} {'no callback':>12}")
for step, losses in enumerate(zip(base, grown, control, strict=True), STOP + 1):
    print(f"{step:4}" + "".join(f" {loss:12.7f}" for loss in losses))
gaps = [max(abs(a - b) / a for a, b in zip(base, run, strict=True)) for run in (grown, control)]
print(f"largest relative difference {gaps[0]:.1e}; without the callback {gaps[1]:.1e}")
assert gaps[0] < 1e-5 < 1e-3 < gaps[1]
