"""`mupscale demo`: the theorem on an MLP to the last digit, next to a control that violates it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..tensors.differences import curve_gap, loss_gap
from ..training.check.demo import BASE, DIFFERENT, EXACT, Curve, K, train


def run(chosen: argparse.Namespace) -> int:
    before, base, wide, control = train(chosen.steps)
    print(f"An MLP of width {BASE}, trained with AdamW, is widened to {BASE * K} at step {len(before)}.\n")
    print(f"{'step':>6}  {'base':>20}  {'wide':>20}  {'|wide - base|':>14}  {'control':>12}")
    every = max(1, chosen.steps // 10)
    for i in [*range(0, chosen.steps, every), chosen.steps - 1]:
        gap = abs(wide[i] - base[i])
        print(f"{len(before) + i:6}  {base[i]:20.16f}  {wide[i]:20.16f}  {gap:14.1e}  {control[i]:12.6f}")
    print("\n" + sketch(before, base, wide, control) + "\n")
    exact, different = curve_gap(base, wide), curve_gap(base, control)
    print(f"wide:    largest relative difference {exact:.1e} over {chosen.steps} steps (float64)")
    print(
        f"control: largest relative difference {different:.1e}; same weights, lr, eps and decay not rescaled"
    )
    print(plot(before, base, wide, control, chosen.plot))
    holds = exact <= EXACT and (different >= DIFFERENT or chosen.steps < 20)
    chosen.found = {
        "holds": holds,
        "wide": exact,
        "control": different,
        "losses": {"base": base, "wide": wide},
    }
    print("the theorem holds" if holds else "the theorem does NOT hold here: please report this machine")
    return 0 if holds else 1


def sketch(before: Curve, base: Curve, wide: Curve, control: Curve, rows: int = 12, columns: int = 64) -> str:
    """The curves as text: `.` base, `o` wide on top of it, `x` the control."""
    total = len(before) + len(base)
    low = min(*base, *wide, *control)
    high = max(*before, *base, *control)
    grid = [[" "] * columns for _ in range(rows)]

    def draw(curve: Curve, start: int, mark: str, every: int = 1) -> None:
        for i, value in enumerate(curve):
            column = (start + i) * (columns - 1) // max(1, total - 1)
            row = round((high - value) / ((high - low) or 1.0) * (rows - 1))
            if column % every == 0:
                grid[row][column] = mark

    draw(before + base, 0, ".")
    draw(control, len(before), "x")
    draw(wide, len(before), "o", every=3)
    lines = [f"{'loss' if not i else '':>6} |{''.join(line)}" for i, line in enumerate(grid)]
    return "\n".join([*lines, f"{'':>6} +{'-' * columns} steps", f"{'':8}. base   o wide   x control"])


def plot(before: Curve, base: Curve, wide: Curve, control: Curve, path: Path) -> str:
    """Write the figure, or say what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "figure: not written; pip install 'mupscale[plot]'"
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    steps = list(range(len(before), len(before) + len(base)))
    left.plot(before + base, color="#444444", lw=2.5, label=f"base, width {BASE}")
    left.plot(steps, wide, color="#e07b39", lw=1.2, ls="--", label=f"wide, width {BASE * K}")
    left.plot(steps, control, color="#9aa5b1", lw=1.2, label="control: settings not rescaled")
    left.axvline(len(before), color="#cccccc", lw=0.8)
    left.set(xlabel="step", ylabel="loss")
    left.set_title(f"widened at step {len(before)}", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    for curve, color in ((wide, "#e07b39"), (control, "#9aa5b1")):
        gaps = [max(loss_gap(a, b), 1e-17) for a, b in zip(base, curve, strict=True)]
        right.plot(steps, gaps, color=color, lw=1)
    right.set(xlabel="step", yscale="log")
    right.set_title("relative distance from the base", fontsize=10)
    figure.savefig(path, dpi=150)
    return f"figure: {path}"
