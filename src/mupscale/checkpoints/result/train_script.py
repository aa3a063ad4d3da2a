"""`train.py` next to a grown directory: a complete script that trains it with the stock Trainer.

The script depends on the kind of model only through the class and the labels: decoders predict the next token, encoders
with a masked head predict masked tokens. Other heads need labels that no text has, so they get no script.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ...files.directory import Directory
from ...files.strict import parse_json, read_regular
from ...files.typed import named

NAME, STATE = "train.py", "trainer_state.json"
_LONGEST = 1 << 28  # bytes; a log has a line for every few steps

_SCRIPT = '''"""Train this model with the stock Trainer: python train.py --data text.jsonl [--steps 1000]

Each line of the file is JSON with "text" (a tokenizer must lie next to this file) or with "input_ids".
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

import mupscale as mu

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, default=HERE / "trained")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--length", type=int, default={length})
parser.add_argument("--lr", "--learning-rate", type=float, {rate}, help="as you would give the base; {source}")
chosen = parser.parse_args()

rows = [json.loads(line) for line in chosen.data.read_text(encoding="utf-8").splitlines() if line.strip()]
tokenizer = None
if "input_ids" in rows[0]:
    tokens = [token for row in rows for token in row["input_ids"]]
else:
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE)
    tokens = [token for row in rows for token in tokenizer(row["text"])["input_ids"]]
count = len(tokens) // chosen.length
if count < 2:
    raise SystemExit(f"{{chosen.data}} has {{len(tokens)}} tokens, fewer than two sequences of {{chosen.length}}")
texts = torch.tensor(tokens[: count * chosen.length]).view(count, chosen.length)
held = max(1, count // 50)  # the last fiftieth is held out


{mask}def collate(batch):
    ids = torch.stack(list(batch))
{labels}


model = transformers.{architecture}.from_pretrained(HERE)
arguments = TrainingArguments(
    output_dir=str(chosen.out),
    max_steps=chosen.steps,
    per_device_train_batch_size=chosen.batch,
    per_device_eval_batch_size=chosen.batch,
    learning_rate=chosen.lr,
    warmup_steps=max(1, chosen.steps // 20),  # a finished base is warmed up again,
    lr_scheduler_type="linear",  # and decayed to zero
    weight_decay=0.1,
    logging_steps=max(1, chosen.steps // 20),
    save_steps=max(1, chosen.steps // 2),
    remove_unused_columns=False,
    report_to=[],
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=list(texts[:-held]),
    eval_dataset=list(texts[-held:]),
    data_collator=collate,
    processing_class=tokenizer,  # saved with the model
    callbacks=[mu.trainers.HuggingFaceCallback(HERE)],  # each tensor's own rate, eps and decay
)
print("held-out loss before:", trainer.evaluate()["eval_loss"])
trainer.train()
print("held-out loss after:", trainer.evaluate()["eval_loss"])
trainer.save_model(str(chosen.out))
shutil.copy(HERE / "mupscale.json", chosen.out)  # its units: it can be trained on and grown again
'''

_NEXT = '    return {"input_ids": ids, "labels": ids}'
_MASK = """MASK = transformers.AutoTokenizer.from_pretrained(HERE).mask_token_id


"""
_MASKED = """    masked = torch.rand(ids.shape) < 0.15
    hidden = ids.masked_fill(masked, MASK)
    return {"input_ids": hidden, "labels": ids.masked_fill(~masked, -100)}"""
_LENGTH = 256
_LR = 3e-4
"""A rate that is usual for small decoders; the recipe's is taken where there is one."""


def rate_of(about: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate to start with, and where it comes from; None where new units were woken and the base's is not known."""
    tuned = ((about["noise"] or {}).get("asked") or {}).get("lr")
    if tuned is not None:
        return tuned, "the recipe's"
    if "peak_lr" not in about:
        return _LR, "a usual rate, not tuned for this model"
    peak = about["peak_lr"]
    half = "half of the base's highest rate, which suits new units"
    return (None, half) if peak is None else (float(f"{peak / 2:.6g}"), f"{half}: {STATE} has {peak:g}")


def peak_rate(directory: Directory) -> float | None:
    """The highest learning rate of the run that left a directory, as its Trainer has logged it; None where it has not.

    The settings of the run (training_args.bin) are a pickle, which is never opened.
    """
    if STATE not in directory.trainer:
        return None
    log = named(parse_json(read_regular(directory.path / STATE, _LONGEST), STATE, infinity=True)).get(
        "log_history"
    )
    rates = (
        [row.get("learning_rate") for row in log if isinstance(row, dict)] if isinstance(log, list) else []
    )
    known = [float(rate) for rate in rates if isinstance(rate, (int, float)) and 0 < rate < inf]
    return max(known, default=None)


def writes_text(about: Mapping[str, Any]) -> bool:
    """Whether the model predicts the next token, so that it can be trained on text and evaluated by lm-eval."""
    name, config = about["architecture"], about["config"]
    return name.endswith(("ForCausalLM", "LMHeadModel")) and not config.get("is_encoder_decoder")


def train_script(about: Mapping[str, Any]) -> str | None:
    """The script for a record, or None for a model whose labels are not its text.

    >>> about = {"architecture": "LlamaForCausalLM", "config": {"max_position_embeddings": 64}, "noise": None}
    >>> "LlamaForCausalLM.from_pretrained" in train_script(about), train_script({**about, "architecture": "ViTModel"})
    (True, None)
    """
    name, config = about["architecture"], about["config"]
    if writes_text(about):
        labels = _NEXT
    elif name.endswith("ForMaskedLM"):
        labels = _MASKED
    else:
        return None
    longest = config.get("max_position_embeddings") or config.get("n_positions") or _LENGTH
    lr, source = rate_of(about)
    rate = "required=True" if lr is None else f"default={lr}"
    return _SCRIPT.format(
        architecture=name,
        labels=labels,
        mask=_MASK if labels is _MASKED else "",
        length=min(_LENGTH, int(longest)),
        rate=rate,
        source=source,
    )
