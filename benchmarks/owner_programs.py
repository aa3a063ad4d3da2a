"""What `checkpoint_owner.py` runs in its environment: makes the bases, measures, trains, resumes, reloads.

    python owner_programs.py NAME ARGUMENT…

Prints one line of JSON last. It imports nothing of this repository, as the environment holds the wheel alone.
"""

from __future__ import annotations

import json
import random
import re
import runpy
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH, BATCH, PAIRS, GREEDY = 64, 8, 200, 60
OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def drawn(base: str, out: str, count: str, seed: str) -> dict[str, Any]:
    """Text that a decoder writes: rows of tokens, one line each."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(int(seed))
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    first = torch.ones(int(count), 1, dtype=torch.long)
    more = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": LENGTH - 1,
        "eos_token_id": -1,
        "pad_token_id": 0,
    }
    rows = model.generate(first, attention_mask=torch.ones_like(first), **more)
    Path(out).write_text("\n".join(json.dumps({"input_ids": row}) for row in rows.tolist()), encoding="utf-8")
    return {"rows": len(rows)}


def old_bert(tokenizer: str, text: str, out: str) -> dict[str, Any]:
    """A small BERT with the names of the first checkpoints: gamma and beta, a pooler, a head for the next sentence."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, BertConfig, BertForPreTraining

    torch.manual_seed(0)
    reader: Any = AutoTokenizer.from_pretrained(tokenizer)
    config = BertConfig(
        vocab_size=len(reader),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
    )
    stock: Any = BertForPreTraining
    model = stock(config)
    ids = torch.tensor(reader(_text(text))["input_ids"][: 12 * LENGTH * 8]).view(-1, 8, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in ids:
        hidden = batch.masked_fill(torch.rand(batch.shape) < 0.15, reader.mask_token_id)
        labels = batch.masked_fill(hidden == batch, -100)
        optimizer.zero_grad()
        model(
            input_ids=hidden, labels=labels, next_sentence_label=torch.ones(8, dtype=torch.long)
        ).loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    reader.save_pretrained(out)
    file, settings = Path(out) / "model.safetensors", Path(out) / "config.json"
    named = {_old(name): tensor for name, tensor in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})
    told = {**json.loads(settings.read_text()), "architectures": ["BertForMaskedLM"]}
    settings.write_text(json.dumps(told))
    return {"old_names": sum(name.endswith((".gamma", ".beta")) for name in named)}


def _old(name: str) -> str:
    return next((name.replace(new, old) for new, old in OLD.items() if name.endswith(new)), name)


def _text(path: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines)


def qwen(data: str, out: str) -> dict[str, Any]:
    """A checkpoint of the stock Trainer after a few steps: a Qwen2 in bfloat16, in shards, with its optimizer state."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    # Without an end token: it would be one of the 512, and the text that chooses the noise continues after it.
    config: Any = Qwen2Config(**sizes, **heads, bos_token_id=1, eos_token_id=None)
    stock: Any = Qwen2ForCausalLM
    model = stock(config).to(torch.bfloat16)
    trainer = _trainer(model, data, Path(out).parent / "run", steps=60, schedule=120)
    trainer.train()
    folder = Path(out).parent / "run" / "checkpoint-60"
    folder.joinpath("model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    shutil.move(folder, out)
    return {
        "shards": len(list(Path(out).glob("model-*.safetensors"))),
        "loss": trainer.state.log_history[-2]["loss"],
    }


def resume(wide: str, data: str, out: str) -> dict[str, Any]:
    """The stock Trainer continues from a grown checkpoint, as the command's next steps say."""
    from transformers import AutoModelForCausalLM

    import mupscale as mu

    model: Any = AutoModelForCausalLM.from_pretrained(wide)
    callback = mu.trainers.HuggingFaceCallback(wide)
    trainer = _trainer(model, data, Path(out), steps=66, schedule=120, callbacks=[callback])
    trainer.train(resume_from_checkpoint=wide)
    return {"loss": trainer.state.log_history[-2]["loss"], "steps": trainer.state.global_step}


def _trainer(model: Any, data: str, out: Path, steps: int, schedule: int, **more: Any) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        """Ends in the middle of the schedule, as an interruption does."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_save = control.should_log = (
                state.global_step >= steps
            )

    arguments = TrainingArguments(
        output_dir=str(out), max_steps=schedule, per_device_train_batch_size=8, learning_rate=3e-3, save_strategy="no",
        logging_steps=5, report_to=[], remove_unused_columns=False, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in _rows(data)]
    callbacks = [Stop(), *more.pop("callbacks", [])]
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks, **more)


def _rows(data: str) -> Tensor:
    lines = Path(data).read_text(encoding="utf-8").splitlines()
    return torch.tensor([json.loads(line)["input_ids"] for line in lines])


def losses(data: str, *folders: str) -> dict[str, Any]:
    """The held-out loss of decoders, and how many tokens of their greedy text are those of the first."""
    from transformers import AutoModelForCausalLM

    rows = _rows(data)
    found, texts = [], []
    for folder in folders:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.eval()
        with torch.no_grad():
            found.append(float(model(input_ids=rows, labels=rows).loss))
            more = {"do_sample": False, "max_new_tokens": GREEDY, "eos_token_id": -1, "pad_token_id": 0}
            texts.append(model.generate(torch.ones(1, 1, dtype=torch.long), **more)[0, 1:])
    return {"losses": found, "tokens": [int((text == texts[0]).sum()) for text in texts]}


def trained(
    script: str, folder: str, data: str, out: str, steps: str, rate: str, every: str
) -> dict[str, Any]:
    """Train a directory by the `train.py` of a grown one: its held-out loss every so many steps.

    A base has no units of its own: the two lines that need a record are left out, and the rest is the same.
    """
    lines = Path(script).read_text(encoding="utf-8").splitlines()
    more = f'    report_to=[], eval_strategy="steps", eval_steps={every}, disable_tqdm=True, use_cpu=True,'
    changed = [more if line.strip() == "report_to=[]," else line for line in lines]
    if not (Path(folder) / "mupscale.json").exists():
        changed = [line for line in changed if '"mupscale.json"' not in line and "callbacks=" not in line]
        if len(changed) != len(lines) - 2:
            raise SystemExit(f"{script} has other lines than expected")
    if more not in changed:
        raise SystemExit(f"{script} has no place for the evaluations")
    program = Path(folder) / "evaluated.py"
    program.write_text("\n".join(changed), encoding="utf-8")
    torch.manual_seed(0)
    given = {"data": data, "out": out, "steps": steps, "batch": BATCH, "length": LENGTH, "lr": rate}
    sys.argv = [str(program), *(str(word) for name, value in given.items() for word in (f"--{name}", value))]
    trainer = runpy.run_path(str(program))["trainer"]
    seen = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    return {"losses": sorted(seen.items()), "parameters": sum(p.numel() for p in trainer.model.parameters())}


def cosines(text: str, *folders: str) -> dict[str, Any]:
    """By how much the cosines of sentence pairs of each further directory differ from those of the first, at most."""
    from sentence_transformers import SentenceTransformer

    draw = random.Random(0)
    documents = [
        _sentences(json.loads(line)["text"]) for line in Path(text).read_text(encoding="utf-8").splitlines()
    ]
    near = [pair for document in documents for pair in pairwise(document)]
    every = [sentence for document in documents for sentence in document]
    pairs = draw.sample(near, PAIRS // 2) + [tuple(draw.sample(every, 2)) for _ in range(PAIRS // 2)]
    found = []
    for folder in folders:
        model: Any = SentenceTransformer(folder, device="cpu")
        ends = [model.encode([pair[i] for pair in pairs], convert_to_tensor=True) for i in (0, 1)]
        found.append(torch.nn.functional.cosine_similarity(*ends))
    return {"differences": [float((found[0] - other).abs().max()) for other in found[1:]]}


def _sentences(text: str) -> list[str]:
    return [line for line in re.split(r"(?<=[.!?])\s+", text) if 40 < len(line) < 200][:12]


def adapters(wide: str, data: str, out: str) -> dict[str, Any]:
    """Twenty steps of LoRA with the stock optimizer on a grown model; the adapter is saved and loaded again."""
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    name = json.loads((Path(wide) / "config.json").read_text())["architectures"][0]
    kind: Any = getattr(transformers, name)
    places = ["q_proj", "v_proj"] if "Causal" in name else ["query", "value"]
    model: Any = get_peft_model(
        kind.from_pretrained(wide, dtype=torch.float32), LoraConfig(r=4, lora_alpha=8, target_modules=places)
    )
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    ids = _ids(wide, data)
    seen = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = _loss(model, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen.append(float(loss.detach()))
    model.save_pretrained(out)
    again: Any = PeftModel.from_pretrained(kind.from_pretrained(wide, dtype=torch.float32), out)
    with torch.no_grad():
        gap = abs(float(_loss(again.eval(), ids)) - float(_loss(model.eval(), ids)))
    if not seen[-1] < seen[0] or gap > 1e-4 * abs(seen[0]):
        raise SystemExit(f"the adapter did not learn ({seen[0]} to {seen[-1]}) or was not saved (gap {gap})")
    return {"from": seen[0], "to": seen[-1]}


def _ids(folder: str, data: str) -> Tensor:
    first = json.loads(Path(data).read_text(encoding="utf-8").splitlines()[0])
    if "input_ids" in first:
        return _rows(data)[:8]
    from transformers import AutoTokenizer

    reader: Any = AutoTokenizer.from_pretrained(folder)
    return torch.tensor(reader(_text(data))["input_ids"][: 8 * LENGTH]).view(8, LENGTH)


def _loss(model: Any, ids: Tensor) -> Tensor:
    """The model's own loss; for an encoder without a head, that each half of a text is nearest to its other half."""
    torch.manual_seed(0)  # the same dropout in every step
    if "labels" in _arguments(model):
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found
    ends = [model(input_ids=half).last_hidden_state.mean(1) for half in ids.chunk(2, dim=1)]
    unit = [torch.nn.functional.normalize(end, dim=-1) for end in ends]
    return torch.nn.functional.cross_entropy(20 * unit[0] @ unit[1].T, torch.arange(len(ids)))


def _arguments(model: Any) -> Any:
    import inspect

    return inspect.signature(model.get_base_model().forward).parameters


def reload(folder: str) -> dict[str, Any]:
    """The stock class loads a directory with nothing missing."""
    import transformers

    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    _, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        raise SystemExit(f"{folder} does not load cleanly: {wrong}")
    return {"class": name}


if __name__ == "__main__":
    programs = (drawn, old_bert, qwen, resume, losses, trained, cosines, adapters, reload)
    chosen = {program.__name__: program for program in programs}[sys.argv[1]]
    print("\n" + json.dumps(chosen(*sys.argv[2:])))
