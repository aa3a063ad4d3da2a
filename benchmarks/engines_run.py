"""DeepSpeed engines continue from a universal checkpoint that was grown, and their losses are the base's.

A small network is trained by a stock DeepSpeed engine on two ranks of CPUs: AdamW, a group with decay and one without, and a
LambdaLR. `ds_to_universal` converts its checkpoint, `grow_checkpoint` writes one of twice the width, without noise, and
a stock engine of that width loads it (`load_universal`). With new units that are awake the first loss is the base's too. Controls start from the same files with one thing changed: moments that
were copied without units, no moments, the base's learning rates in every group.

    python benchmarks/engines_run.py

Prints a row for every job and, last, `zero1=A zero2=B zero3=C trainer=T awake=U control=D`: the largest relative difference of a loss from the base's,
by stage of ZeRO, that of Hugging Face's Trainer with ZeRO 2, the largest of the first losses with new units, and the smallest of the controls'
largest differences. One control is new units once they are trained. The exit code is 1 when
one of the first is above 1e-5 or D below 1e-3. Without DeepSpeed it prints SKIPPED.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mupscale as mu
from harness.program import Outcome, option, run
from harness.torchrun import AWAKE, CHANGED, Curves, compared, finish
from mupscale.formats.deepspeed.grow import grow_universal_checkpoint

WORLD, WORDS, WIDTH, K, ROWS = 2, 50, 16, 2, 32
STOP, END = 6, 12
TIMEOUT = 1200  # seconds for a stage, on machines that are shared; the first engine compiles a library for its collectives
CASES = {"zero1": WORLD, "zero2": WORLD, "zero3": WORLD, "trainer": 1}
"""How many ranks each has."""


def make(width: int) -> nn.Sequential:
    body = [nn.Embedding(WORDS, width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*body, nn.LayerNorm(width), nn.Linear(width, WORDS))


def own_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as people write them: matrices decay, vectors do not."""
    parameters = list(model.named_parameters())
    matrices = [p for _, p in parameters if p.dim() > 1]
    return [
        {"params": matrices, "lr": 2e-2, "weight_decay": 0.1},
        {"params": [p for _, p in parameters if p.dim() < 2], "lr": 1e-2, "weight_decay": 0.0},
    ]


def schedule(step: int) -> float:
    return min(1.0, (step + 1) / 4) * (1 - step / (2 * END))


def engine_of(model: nn.Module, groups: Any, stage: int) -> Any:
    """A stock engine; `load_universal` is what its config says in order to load such a checkpoint."""
    optimizer = torch.optim.AdamW(groups)
    config = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    deepspeed = import_module("deepspeed")
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (WORLD, ROWS // WORLD, 2), generator=generator)[dist.get_rank()]
        loss = nn.functional.cross_entropy(engine(words[:, 0]), words.sum(1) % WORDS)
        engine.backward(loss)
        engine.step()
        total: Tensor = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / WORLD)
    return losses


def first_rank(work: Any) -> None:
    """What one rank does while the others wait."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def convert(run: Path) -> None:
    tag = (run / "latest").read_text().strip()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(run / tag), "--output_folder", str(run / f"{tag}_universal")]
    subprocess.run([*command, *folders], check=True, capture_output=True)


def change(run: Path, out: Path, plan: mu.Plan, control: str) -> None:
    """The wide checkpoint with its moments as they would be without units, or with zeros in their place."""
    shutil.copytree(run, out)
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter":
            continue
        r = float(entry.change.r)
        for key, units in (("exp_avg", r), ("exp_avg_sq", r * r)):
            file = out / (run / "latest_universal").read_text() / "zero" / name / f"{key}.pt"
            tree = torch.load(file)
            tensor = tree["param"] if isinstance(tree, dict) else tree
            tensor.mul_(0.0 if control == "fresh" else 1 / units)
            torch.save(tree, file)


def run_stage(stage: int, folder: Path) -> Curves:
    """All jobs of one stage of ZeRO, on this rank."""
    plan, narrow, wide = mu.plans.plan_between(make, WIDTH, K * WIDTH), folder / "narrow", folder / "wide"
    torch.manual_seed(0)
    model = make(WIDTH)
    engine = engine_of(model, own_groups(model), stage)
    train(engine, 0, STOP)
    engine.save_checkpoint(str(narrow))
    curves = {"base": train(engine, STOP, END)}

    def loss(model: nn.Module) -> Tensor:
        words = torch.arange(ROWS * 2).view(ROWS, 2) % WORDS
        return nn.functional.cross_entropy(model(words[:, 0]), words.sum(1) % WORDS)

    def grow() -> None:
        convert(narrow)
        units = mu.infer_plan(make(WIDTH), make(K * WIDTH), loss=loss, by="units")
        mu.grow_checkpoint(narrow, folder / AWAKE, plan=units, noise=mu.NewUnits())
        grow_universal_checkpoint(narrow, wide, plan=plan)
        for control in ("units", "fresh"):
            change(wide, folder / control, plan, control)
        shutil.copytree(wide, folder / "rates")

    first_rank(grow)
    for job in ("wide", AWAKE, *CHANGED):
        torch.manual_seed(1)
        model = make(K * WIDTH)
        groups = mu.trainers.groups_for(model, folder / AWAKE if job == AWAKE else wide)
        factors = [group["lr_factor"] for group in groups]
        engine = engine_of(model, groups, stage)
        mu.trainers.load_universal_(engine, folder / job)
        if job == "rates":
            rates = zip(engine.lr_scheduler.base_lrs, factors, strict=True)
            engine.lr_scheduler.base_lrs = [rate / factor for rate, factor in rates]
            for group, factor in zip(engine.optimizer.param_groups, factors, strict=True):
                group["lr"] /= factor
        curves[job] = train(engine, STOP, END)
    return curves


def run_trainer(folder: Path) -> Curves:
    """Hugging Face's Trainer with ZeRO 2 on one rank: its directory is converted, grown and resumed from."""
    transformers = import_module("transformers")
    rows = torch.randint(WORDS, (8 * END, 12), generator=torch.Generator().manual_seed(0))

    def trained(kind: Any, model: nn.Module, universal: bool, start: Path | None = None) -> list[float]:
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": universal},
        }
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            weight_decay=0.1,
            warmup_steps=3,
            max_steps=END,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no" if universal else "steps",
            save_steps=STOP,
            optim="adamw_torch",
            deepspeed=config,
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = kind(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][STOP:]

    class WideTrainer(transformers.Trainer):  # type: ignore[name-defined,misc]
        optimizer: Any
        directory: Path

        def create_optimizer(self, *_: Any) -> Any:
            if self.optimizer is None:
                groups = mu.trainers.groups_for(self.model, self.directory)
                self.optimizer = torch.optim.AdamW(groups)
            return self.optimizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    curves = {"base": trained(transformers.Trainer, base, universal=False)}
    saved = folder / "trainer" / f"checkpoint-{STOP}"
    convert(saved)
    for verb, out in (("grow", "wide"), ("upscale", AWAKE)):
        command = ["-m", "mupscale", verb, str(saved), str(folder / out), "-k", str(K), "--quiet"]
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
    plan = mu.Plan.from_json(json.dumps(json.loads((folder / "wide" / "mupscale.json").read_text())["plan"]))
    change(folder / "wide", folder / "fresh", plan, "fresh")
    for job in ("wide", AWAKE, "fresh"):
        model = transformers.LlamaForCausalLM.from_pretrained(folder / job, dtype=torch.float32)
        WideTrainer.directory = folder / job
        curves[job] = trained(WideTrainer, model, universal=True, start=folder / job)
    return curves


def worker(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])
    import_module("deepspeed").init_distributed("gloo")
    finish(folder, run_trainer(folder) if case == "trainer" else run_stage(int(case[-1]), folder))


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.worker is not None:
        worker(chosen.worker[0], Path(chosen.worker[1]))
        return Outcome("")
    if find_spec("deepspeed") is None:
        return Outcome("SKIPPED: deepspeed is not installed; pip install deepspeed")
    cases = {chosen.only: CASES[chosen.only]} if chosen.only else CASES
    return compared(__file__, cases, timeout=TIMEOUT, settings={"DS_ACCELERATOR": "cpu"})


if __name__ == "__main__":
    part = option("--worker", nargs=2, help=argparse.SUPPRESS)
    only = option("--only", choices=CASES, help="one of the cases")
    sys.exit(run(measure, part, only, doc=__doc__))
