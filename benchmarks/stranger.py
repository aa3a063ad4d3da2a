"""A stranger gets from nothing to a widened checkpoint, checked and trained on, within five minutes.

Builds the sdist, and the wheel from it; makes an empty environment with torch from the registry in it; installs the
wheel; runs the Python blocks of the README, the demo and the doctor. Then a small Llama is saved as anybody would,
widened and checked on the command line, and trained for 50 steps beside its base, in float32: stock Llama casts to it
in every norm. Two controls: before the extra is installed the command must say in one line what to install, and the wide
model under the base's own settings must leave the base.

    python benchmarks/stranger.py [--keep dist] [--seconds 300] [--shared]

Needs a package registry that pip reaches; without one the exit code is 2. The last line is
`seconds=S torch=S install=S readme=S grow=S train=S cpu=S gap=E control=C`: the whole, its parts, processor seconds of all
of it, and the largest relative difference of a loss from the base's. The exit code is 1 when anything fails, or the whole
takes more than 300 seconds on two cores; with `--shared`, for machines with other work, processor seconds are judged.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.new_user import ROOT, Shell, installed, wheel_in, with_torch

SECONDS, EXACT, DIFFERENT = 300.0, 1e-5, 1e-3
REMEDY = "pip install 'mupscale[hf]'"
README = ROOT / "README.md"

BARE = """
import json, os, torch
from safetensors.torch import save_file
os.mkdir("bare")
save_file({"w": torch.zeros(2)}, "bare/model.safetensors")
json.dump({"model_type": "llama"}, open("bare/config.json", "w"))
"""
SAVE = """
import torch
torch.manual_seed(0)  # how far float32 rounding drifts in 50 steps depends on the draw: 3e-7 to 1e-5
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1)).save_pretrained("base")
"""
TRAIN = """
import torch, mupscale as mu
from transformers import LlamaForCausalLM

def model(path):
    return LlamaForCausalLM.from_pretrained(path)

def losses(model, optimizer):
    for step in range(50):
        rows = torch.randint(97, (8, 16), generator=torch.Generator().manual_seed(step % 5))
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        yield float(loss.detach())

torch.set_num_threads(1)
plain = lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3)
base, wide, control = model("base"), model("wide"), model("wide")
a = list(losses(base, plain(base)))
b = list(losses(wide, mu.optimizer_for(wide, "wide", torch.optim.AdamW, lr=3e-3)))
c = list(losses(control, plain(control)))
print("from", a[0], "to", a[-1])
print(*(max(abs(x - y) / x for x, y in zip(a, other)) for other in (b, c)))
"""


def blocks_of(readme: str) -> str:
    """The Python of a page, as one program.

    >>> blocks_of("text\\n```python\\nx = 1\\n```\\nmore\\n```py\\nnot this\\n```")
    'x = 1\\n'
    """
    return "\n".join(re.findall(r"```python\n(.*?)```", readme, re.S))


def walk(shell: Shell, wheel: Path) -> tuple[list[str], tuple[float, float]]:
    """Everything that the stranger does; what failed, and how far the losses were from the base's."""
    failed: list[str] = []
    programs = {
        "readme": blocks_of(README.read_text(encoding="utf-8")),
        "bare": BARE,
        "save": SAVE,
        "train": TRAIN,
    }
    if not programs["readme"].strip():
        failed.append("the README has no Python to run")
    for name, text in programs.items():
        (shell.room / f"{name}.py").write_text(text, encoding="utf-8")

    def must(what: str, *command: str | Path) -> str:
        done = shell.run(what, command)
        if done.returncode:
            failed.append(f"{' '.join(map(str, command))}: exit code {done.returncode}")
        return done.stdout

    must("install", "pip", "install", "--quiet", wheel)
    if wheel.name.split("-")[1] not in must("readme", "mupscale", "--version"):
        failed.append(f"{wheel.name} holds another version than it says")
    must("readme", "python", "readme.py")
    must("readme", "mupscale", "demo")
    must("readme", "mupscale", "doctor")
    must("readme", "python", "bare.py")
    bare = shell.run("control", ["mupscale", "plan", "bare", "-k", "2"])
    if bare.returncode != 2 or REMEDY not in bare.stderr or "Traceback" in bare.stderr:
        failed.append("without the extra the command does not say in one line what to install")
    must("install", *installed("pip install --quiet 'mupscale[hf]'", wheel))
    must("grow", "python", "save.py")
    must("grow", "mupscale", "widen", "base", "wide", "-k", "2", "--quiet")
    must("grow", "mupscale", "check", "base", "wide", "--quiet")
    must("grow", "mupscale", "upscale", "base", "noisy", "-k", "2", "--noise", "t=0.05", "--quiet")
    must("grow", "mupscale", "check", "base", "noisy", "--quiet")
    told = must("train", "python", "train.py").split()[-2:]
    gap, control = map(float, told) if len(told) == 2 else (float("nan"), float("nan"))
    if not gap <= EXACT:
        failed.append(f"the widened run differs from the base by {gap:.1e}, allowed {EXACT:.0e}")
    if not control >= DIFFERENT:
        failed.append(f"under the base's settings it differs by {control:.1e} only; the test cannot tell")
    return failed, (gap, control)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, help="where to leave sdist and wheel when everything holds")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long the whole may take")
    parser.add_argument("--shared", action="store_true", help="judge processor seconds instead of the clock")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shell = Shell(Path(name))
        wheel = wheel_in(shell.room / "dist")
        began = time.monotonic()
        if not with_torch(shell):
            return 2
        failed, (gap, control) = walk(shell, wheel)
        seconds = time.monotonic() - began
        if options.keep is not None and not failed:
            shutil.copytree(shell.room / "dist", options.keep, dirs_exist_ok=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    judged, unit = (cpu, "CPU seconds") if options.shared else (seconds, "seconds")
    if judged > options.seconds:
        failed.append(f"{judged:.0f} {unit}, allowed {options.seconds:.0f}")
    for failure in failed:
        print(f"FAILED: {failure}")
    parts = ("torch", "install", "readme", "grow", "train")
    spent = " ".join(f"{what}={shell.seconds.get(what, 0.0):.0f}" for what in parts)
    print(f"\nseconds={seconds:.0f} {spent} cpu={cpu:.0f} gap={gap:.1e} control={control:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
