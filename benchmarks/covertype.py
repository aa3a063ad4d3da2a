"""An upscaled MLP leaves its base's loss behind, and without noise it is the base: on Forest Cover Type.

A base of width 64 is trained under μP and upscaled to width 256; base, wide at zero noise and wide with noise
continue with the same learning rate on the same batches. The control is the zero-noise run: width alone changes
nothing, so what the noisy run gains is the new width put to use.

    python benchmarks/covertype.py [--figure docs/figures/covertype.png]

Needs covtype/covtype.npz under $MUPSCALE_DATA or ../shared/data; without it the exit code is 2. The last line is
`base=L zero_noise=D upscaled=L margin=M`: the mean training loss over the last steps of base and upscaled run, the
largest difference of the zero-noise run's loss from the base's, relative, and what upscaling gained. The exit
code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.data import DATA
from harness.program import Outcome, UsageError, option, run
from harness.runs import step

ROWS_FILE = DATA / "covtype" / "covtype.npz"
ROWS, BATCH, LAYERS, BASE, WIDE = 100_000, 1000, 4, 64, 256
SIGMA, RATE = 0.1, 3e-3
BEFORE, AFTER, LAST = 300, 300, 50
EQUAL, MARGIN = 1e-9, 0.0  # in float64


def make(width: int) -> nn.Module:
    sizes = [54] + [width] * (LAYERS - 1)
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 7))


def load() -> tuple[Tensor, Tensor]:
    """A fixed subset of the rows: ten measurements in units of their spread, and one-hot columns."""
    data = np.load(ROWS_FILE)
    rows = np.sort(np.random.default_rng(0).choice(len(data["y"]), ROWS, replace=False))
    numbers = data["cont"][rows].astype("f4")
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    hot = [np.eye(n, dtype="f4")[data[key][rows]] for key, n in (("wilderness", 4), ("soil", 40))]
    x = np.concatenate([numbers, *hot], 1)
    return torch.from_numpy(x).double(), torch.from_numpy(data["y"][rows].astype("i8") - 1)


def train(run: mu.Run, data: tuple[Tensor, Tensor], steps: range) -> list[float]:
    """Take the steps; return the loss of every batch before its step. A batch is a function of its number."""
    losses = []
    for number in steps:
        rows = torch.randint(ROWS, (BATCH,), generator=torch.Generator().manual_seed(number))
        loss = F.cross_entropy(run.model(data[0][rows]), data[1][rows])
        step(run, loss)
        losses.append(float(loss.detach()))
    return losses


def smooth(losses: Sequence[float], window: int = 20) -> list[float]:
    """The mean of the last `window` losses at every step, or of those there are."""
    return [fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def draw(before: Sequence[float], after: Mapping[str, Sequence[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    looks = {"base": ("C0", 3.5, "-"), "zero noise": ("black", 1, ":"), "upscaled": ("C1", 1.8, "-")}
    for name, losses in after.items():
        colour, width, style = looks[name]
        whole = smooth([*before, *losses])
        steps = range(len(before), len(whole))
        label = f"width {BASE if name == 'base' else WIDE}, {name}"
        axes.plot(steps, whole[len(before) :], color=colour, lw=width, ls=style, label=label)
    shown = len(before) // 2
    axes.plot(range(shown, len(before)), smooth(before)[shown:], color="C0", lw=3.5)
    axes.axvline(len(before), color="grey", lw=0.7)
    axes.set(xlabel="step", ylabel="training loss (mean of 20 steps)", title="Forest Cover Type, AdamW")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def measure(chosen: argparse.Namespace) -> Outcome:
    if not ROWS_FILE.is_file():
        raise UsageError(
            f"needs Forest Cover Type at {ROWS_FILE}; set MUPSCALE_DATA to the folder that holds covtype/covtype.npz"
        )
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = load()
    model = make(BASE)
    reference = mu.plans.plan_between(make, BASE, BASE)
    groups = mu.param_groups(model, reference, torch.optim.AdamW, lr=RATE)
    base = mu.Run(model, torch.optim.AdamW(groups))
    before = train(base, data, range(BEFORE))
    runs = {
        "upscaled": mu.upscale(base, lambda: make(WIDE), mu.MupNoise(SIGMA), seed=0),
        "zero noise": mu.upscale(base, lambda: make(WIDE), mu.MupNoise(0.0), seed=0),
        "base": base,  # last, because training moves it
    }
    ahead = range(BEFORE, BEFORE + AFTER)
    after = {name: train(run, data, ahead) for name, run in reversed(runs.items())}
    if chosen.figure is not None:
        draw(before, after, chosen.figure)
    gap = max(abs(a - b) / b for a, b in zip(after["zero noise"], after["base"], strict=True))
    print(f"step {BEFORE}: loss {after['base'][0]:.4f}, {after['upscaled'][0]:.4f} with noise {SIGMA}")
    for steps in range(LAST, AFTER + 1, LAST):
        row = "  ".join(f"{name} {fmean(losses[steps - LAST : steps]):.4f}" for name, losses in after.items())
        print(f"step {BEFORE + steps}: {row}")
    ends = {name: fmean(losses[-LAST:]) for name, losses in after.items()}
    margin = ends["base"] - ends["upscaled"]
    failed = []
    if not gap <= EQUAL:
        failed.append(f"zero noise differs from the base by {gap:.1e}, allowed {EQUAL:.0e}")
    if not margin > MARGIN:
        failed.append(f"the upscaled run is ahead of its base by {margin:.4f} only")
    line = f"base={ends['base']:.4f} zero_noise={gap:.1e} upscaled={ends['upscaled']:.4f} margin={margin:.4f}"
    return Outcome(line, failed)


if __name__ == "__main__":
    sys.exit(run(measure, option("--figure", type=Path, help="where to draw the losses"), doc=__doc__))
