"""The paper's own runs, from their sizes: every total and speedup that its appendix prints.

    python -m reproduce.paper_cost

Knows the sizes, lengths and grids of its three experiments. The lengths of the upscaled runs are its
measurements; everything else is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from mupscale.budgets.cost import ComparedRuns, Cost, Number
from mupscale.budgets.flops import gpt2_parameters, mlp_flops, resnet18_flops, transformer_flops
from mupscale.text import columns

COVERTYPE = 581_012 * 4 // 5
CIFAR = 50_000
VOCABULARY = 50_304
TOKENS = 262_144
CONTEXT = 1_024
LAYERS = 12
HEADS = 12
_MISSING = "–"


@dataclass(frozen=True)
class Experiment:
    """One run of the paper. A step is an epoch, or a batch of tokens; `grid` None: its size is not stated.

    >>> round(EXPERIMENTS["GPT-2"].tuning_ratio, 1), round(EXPERIMENTS["GPT-2"].cost.speedup("both charged"), 2)
    (48.2, 1.03)
    """

    case: ComparedRuns
    flops_at: Callable[[int], int]
    grid: tuple[int, int] | None = None

    @property
    def cost(self) -> Cost:
        return self.case.cost(self.flops_at)

    @property
    def tuning_ratio(self) -> float:
        """How many times more a tuning run costs at the target than at the proxy."""
        return self.flops_at(self.case.wide) / self.flops_at(self.case.k * self.case.proxy)


def mlp_epoch(width: int) -> int:
    """An epoch on four fifths of Forest Cover Type, 54 features, 7 classes."""
    return COVERTYPE * mlp_flops(54, width, 7, layers=4)


def resnet_epoch(width: int) -> int:
    """An epoch on CIFAR-100; the width is that of the first stage."""
    return CIFAR * resnet18_flops(width, classes=100, size=32)


def gpt2_step(width: int, vocabulary: int = VOCABULARY, tokens: int = TOKENS) -> int:
    """A step of GPT-2; the vocabulary and the batch are those that its totals need, not those in its text."""
    parameters = gpt2_parameters(width, LAYERS, vocabulary)
    return tokens * transformer_flops(parameters, LAYERS, width, CONTEXT)


def _experiment(
    flops_at: Callable[[int], int],
    widths: tuple[int, int, int],
    steps: int,
    upscaled: Number,
    grid: tuple[int, int] | None = None,
) -> Experiment:
    width, k, proxy = widths
    trials = grid[0] * grid[1] if grid else 0
    return Experiment(ComparedRuns(width, k, proxy, steps, steps, trials, upscaled), flops_at, grid)


# MLP and ResNet lengths are means of five runs, in epochs; GPT-2's is in steps. They are the only fifths of an
# epoch, and the only step, that give the TFLOPs which the paper prints.
EXPERIMENTS = {
    "MLP, SGD": _experiment(mlp_epoch, (500, 4, 100), 500, Fraction(132, 5)),
    "MLP, AdamW": _experiment(mlp_epoch, (500, 4, 100), 500, Fraction(669, 5)),
    "ResNet-18": _experiment(resnet_epoch, (128, 2, 32), 100, 50),
    "GPT-2": _experiment(gpt2_step, (160 * HEADS, 2, 16 * HEADS), 10_000, 1_724, grid=(5, 5)),
}


def tera(flops: Number) -> str:
    """FLOPs in whole TFLOPs, as the paper prints them.

    >>> tera(739.7435235e12)
    '740'
    """
    return f"{float(flops) / 1e12:,.0f}"


def paper() -> str:
    """The paper's totals and speedups, each computed from sizes."""
    runs = EXPERIMENTS
    rows: list[tuple[str, ...]] = [("", *runs)]

    def row(what: str, show: Callable[[Experiment], str]) -> None:
        rows.append((what, *(show(experiment) for experiment in runs.values())))

    def tuned(show: Callable[[Experiment], str]) -> Callable[[Experiment], str]:
        return lambda run: show(run) if run.grid else _MISSING

    row("n -> k·n", lambda run: f"{run.case.width:,} -> {run.case.wide:,}")
    row("n0 -> k·n0", lambda run: f"{run.case.proxy} -> {run.case.k * run.case.proxy}")
    row("TFLOPs from scratch", lambda run: tera(run.cost.scratch))
    row("TFLOPs of the base", lambda run: tera(run.cost.base))
    row("TFLOPs upscaled", lambda run: tera(run.cost.upscaled))
    row("TFLOPs of tuning", tuned(lambda run: tera(run.cost.tuning)))
    row("a trial at k·n / at k·n0", lambda run: f"{run.tuning_ratio:.1f}")
    row(
        "stay: steps at n / at k·n",
        lambda run: f"{run.case.steps_throughout(run.flops_at) / run.case.steps:.1f}",
    )
    row("speedup, base sunk", lambda run: f"{run.cost.speedup('base sunk'):.1f}")
    row("speedup, base charged", lambda run: f"{run.cost.speedup('base charged'):.1f}")
    row("speedup, tuning charged", tuned(lambda run: f"{run.cost.speedup('tuning charged'):.1f}"))
    row("speedup, both charged", tuned(lambda run: f"{run.cost.speedup('both charged'):.2f}"))
    notes = (
        f"GPT-2's totals need a vocabulary of {VOCABULARY:,} and {TOKENS:,} tokens per step; the paper's text says 50,257 and 0.5 M.",
        f"{_MISSING}: the paper states no size of the grid. The search for the first learning rate is charged nowhere.",
    )
    return columns(rows, right=tuple(range(1, len(runs) + 1)), indent=0) + "\n\n" + "\n".join(notes)


if __name__ == "__main__":
    print(paper())
