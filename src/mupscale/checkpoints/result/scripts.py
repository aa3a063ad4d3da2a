"""The texts of `train.py`: for sequences of tokens, for pairs of sentences, and for images.

Knows how the trainers of transformers and sentence-transformers are called. `train_script.py` says which text a model gets, and
fills the braces.
"""

from __future__ import annotations

TOKENS = '''"""Train this model with the stock Trainer: python train.py --data text.jsonl [--steps 1000]

Each line of the file is JSON with "text" (a tokenizer must lie next to this file) or with "input_ids".
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

{head}rows = [json.loads(line) for line in chosen.data.read_text(encoding="utf-8").splitlines() if line.strip()]
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
{settings}
    remove_unused_columns=False,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=list(texts[:-held]),
    eval_dataset=list(texts[-held:]),
    data_collator=collate,
    processing_class=tokenizer,  # saved with the model
{run}'''

PAIRS = '''"""Train this model with sentence-transformers: python train.py --data pairs.jsonl [--steps 1000]

Each line of the file is JSON with "anchor" and "positive": two texts that belong together. The other positives of a batch are
the negatives. Needs pip install "sentence-transformers[train]".
"""

import argparse
import json
import shutil
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

{head}rows = [json.loads(line) for line in chosen.data.read_text(encoding="utf-8").splitlines() if line.strip()]
pairs = [{{"anchor": row["anchor"], "positive": row["positive"]}} for row in rows]
held = max(2, len(pairs) // 50)  # the last fiftieth is held out
if len(pairs) < 2 * held:
    raise SystemExit(f"{{chosen.data}} has {{len(pairs)}} pairs, fewer than four")

model = SentenceTransformer(str(HERE))
arguments = SentenceTransformerTrainingArguments(
{settings}
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_list(pairs[:-held]),
    eval_dataset=Dataset.from_list(pairs[-held:]),
    loss=MultipleNegativesRankingLoss(model),
{run}'''

IMAGES = '''"""Train this model with the stock Trainer: python train.py --data images.safetensors [--steps 1000]

The file holds "pixel_values", as the image processor of the base returns them, and "labels", the number of each image's class.
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

{head}data = load_file(chosen.data)
images, labels = data["pixel_values"].float(), data["labels"].long()
if len(labels) < 2:
    raise SystemExit(f"{{chosen.data}} has fewer than two images")
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
rows = [{{"pixel_values": images[i], "labels": labels[i]}} for i in order]
held = max(1, len(rows) // 50)  # a fiftieth is held out

model = transformers.{architecture}.from_pretrained(HERE)
arguments = TrainingArguments(
{settings}
    remove_unused_columns=False,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=rows[:-held],
    eval_dataset=rows[-held:],
{run}'''

TEXTS = {"tokens": TOKENS, "pairs": PAIRS, "images": IMAGES}
HEAD = """import mupscale as mu

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, default=HERE / "trained")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=16)
{length}parser.add_argument("--lr", "--learning-rate", type=float, {rate}, help="as you would give the base; {source}")
chosen = parser.parse_args()

"""
LENGTH = 'parser.add_argument("--length", type=int, default={length})\n'
SETTINGS = """    output_dir=str(chosen.out),
    max_steps=chosen.steps,
    per_device_train_batch_size=chosen.batch,
    per_device_eval_batch_size=chosen.batch,
    learning_rate=chosen.lr,
    warmup_steps=max(1, chosen.steps // 20),  # a finished base is warmed up again,
    lr_scheduler_type="linear",  # and decayed to zero
    weight_decay=0.1,
    logging_steps=max(1, chosen.steps // 20),
    save_steps=max(1, chosen.steps // 2),
    report_to=[],"""
"""Of the arguments of both trainers."""
RUN = """    callbacks=[mu.trainers.HuggingFaceCallback(HERE)],  # each tensor's own rate, eps and decay
)
print("held-out loss before:", trainer.evaluate()["eval_loss"])
trainer.train()
print("held-out loss after:", trainer.evaluate()["eval_loss"])
trainer.save_model(str(chosen.out))
shutil.copy(HERE / "mupscale.json", chosen.out)  # its units: it can be trained on and grown again
"""
NEXT = '    return {"input_ids": ids, "labels": ids}'
MASK = """MASK = transformers.AutoTokenizer.from_pretrained(HERE).mask_token_id


"""
MASKED = """    masked = torch.rand(ids.shape) < 0.15
    hidden = ids.masked_fill(masked, MASK)
    return {"input_ids": hidden, "labels": ids.masked_fill(~masked, -100)}"""
