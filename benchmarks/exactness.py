"""A widened run continues its base to the last digits: every optimizer on every model it accepts.

A base is trained for a few steps, widened with its optimizer state, and both continue in float64 on the same
data. The figure is the largest difference of their outputs on a held-out batch, relative to the largest
output. Next to it stand the controls, the same run with one factor of the registry left at 1.

Some runs are chaotic: after 200 steps of CAME on a Llama, a base whose weights were moved by one rounding is another
model. Where a pair is beyond the bound, such a nudged base is trained too, and the pair is held to the bound for as long
as the nudged base stays within 1e-11 of the base, which must be 20 steps or more. `parted` counts these pairs.

    python benchmarks/exactness.py [--quick] [--only "SGD momentum"]

The last line is `pairs=N worst=E control=C parted=P`; the exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

import mupscale as mu
from harness.closeness import difference
from harness.controls import EXCUSES, NOT_IN_A_RUN, wrong_for, wrong_rules
from harness.exactness import EVERY, every_third, precise_muon, prepare_worker, train, warm_base
from harness.models import CASES, Case
from harness.program import Outcome, UsageError, option, pool, run
from harness.setups import SETUPS, Setup
from mupscale.rules.optimizers import RULES, qualified_name

STEPS, QUICK_STEPS, CONTROL_STEPS = 200, 20, 20
WORST, CONTROL, MOVED, PAIRS = 1e-10, 1e-6, 1e-2, 280
PARTED = 1e-11
"""Distance at which a nudged base has parted: a tenth of the bound, because wide runs round more than their base."""
CONTROL_CASE = CASES["MLP+p"]  # copies and padding, so that factors of the fill show as well


@dataclass(frozen=True)
class Pair:
    """One optimizer on one model: the difference, and how far the base moved meanwhile."""

    setup: str
    case: str
    error: float
    moved: float
    held: int
    """Steps over which the base, nudged by a rounding, stays close to itself; all of them where that was not asked."""


@dataclass(frozen=True)
class Control:
    """The difference when one factor of an optimizer's row is left at 1."""

    setup: str
    optimizer: str
    key: str
    effect: float


def compare(setup: Setup, case: Case, base: mu.Run, wides: Sequence[mu.Run], steps: int) -> list[Pair]:
    """Train the base and the wide runs side by side, and hold each wide run against the base."""
    ahead = range(setup.warm, setup.warm + steps)
    wanted = train(base, case, setup.sign, ahead)
    moved = difference(wanted[0], wanted[-1])
    pairs = []
    for wide in wides:
        found = train(wide, case, setup.sign, ahead)
        errors = [*map(difference, found, wanted)]
        held = steps
        if not max(errors) <= WORST:
            held = steps_until_parted(setup, case, wanted)
            errors = errors[: held // EVERY + 1]
        pairs.append(Pair(setup.name, case.name, max(errors), moved, held))
    return pairs


def steps_until_parted(setup: Setup, case: Case, wanted: Sequence[Tensor]) -> int:
    """Steps over which a base that is nudged by one rounding has the outputs `wanted` to `PARTED`."""
    nudged = warm_base(setup, case)
    with torch.no_grad():
        for weight in nudged.model.parameters():
            weight.mul_(1 + torch.finfo(weight.dtype).eps * torch.randn_like(weight).sign())
    outputs = train(nudged, case, setup.sign, range(setup.warm, setup.warm + EVERY * (len(wanted) - 1)))
    close = takewhile(lambda gap: gap <= PARTED, map(difference, outputs, wanted))
    return EVERY * max(0, sum(1 for _ in close) - 1)


def measure_pair(setup_name: str, case_name: str, steps: int, stock: bool = False) -> Pair:
    setup, case = SETUPS[setup_name], CASES[case_name]
    with nullcontext() if stock else precise_muon():
        base = warm_base(setup, case)
        wide = mu.grow(base, lambda: case.make(case.wide), plan=case.plan)
        return compare(setup, case, base, [wide], steps)[0]


def measure_controls(setup_name: str) -> list[Control]:
    setup = SETUPS[setup_name]
    case = CONTROL_CASE if setup.accepts(CONTROL_CASE) else next(filter(setup.accepts, CASES.values()))
    name = qualified_name(setup.optimizer)
    with precise_muon():
        base = warm_base(setup, case)
        rules = wrong_for(base.optimizers[0], RULES[name])
        wides = [
            mu.grow(base, lambda: case.make(case.wide), plan=case.plan, rules={**RULES, name: rule})
            for rule in rules.values()
        ]
        pairs = compare(setup, case, base, wides, CONTROL_STEPS)
    optimizer = setup.optimizer.__name__
    return [Control(setup.name, optimizer, key, p.error) for key, p in zip(rules, pairs, strict=True)]


def failures(pairs: Sequence[Pair], controls: Sequence[Control]) -> Iterable[str]:
    """Every bound that does not hold on what was run, in words."""
    for p in pairs:
        if not p.error <= WORST:
            yield f"{p.setup} on {p.case} differs by {p.error:.1e}, allowed {WORST:.0e}"
        if p.held < QUICK_STEPS:
            yield f"{p.setup} on {p.case} parts from itself after {p.held} steps, so it tests nothing"
        if not p.moved >= MOVED:
            yield f"{p.setup} on {p.case} moved its base by {p.moved:.1e} only, so it tests nothing"
    for c in controls:
        if (c.setup, c.key) in EXCUSES:
            if not c.effect < CONTROL:
                yield f"{c.setup} is excused from {c.key}, yet it has an effect of {c.effect:.1e}"
        elif not c.effect >= CONTROL:
            yield f"{c.setup} does not notice that {c.key} is left at 1: {c.effect:.1e}"


def gaps(controls: Sequence[Control]) -> Iterable[str]:
    """What a run of all optimizers left out, in words."""
    for setup, key in sorted(EXCUSES.keys() - {(c.setup, c.key) for c in controls}):
        yield f"{setup} is excused from {key}, which it does not have"
    seen = {(c.optimizer, c.key) for c in controls}
    for kind in dict.fromkeys(setup.optimizer for setup in SETUPS.values()):
        for key in (key for row in RULES[qualified_name(kind)].every_row for key in wrong_rules(row)):
            if (kind.__name__, key) not in seen and (kind.__name__, key) not in NOT_IN_A_RUN:
                yield f"no run has a factor for {key} of {kind.__name__}"
    run = [RULES[qualified_name(setup.optimizer)] for setup in SETUPS.values()]
    for name, rule in RULES.items():
        if all(rule is not other for other in run):
            yield f"no run has the row of {name}"


def print_pairs(pairs: Sequence[Pair], stock: Sequence[Pair]) -> None:
    print("relative difference of outputs, and the least that a base moved\n")
    print(" " * 20 + "".join(f"{name:>10}" for name in [*CASES, "moved"]))
    for rows, suffix in ((pairs, ""), (stock, " bf16")):
        for name in dict.fromkeys(p.setup for p in rows):
            row = {p.case: p for p in rows if p.setup == name}
            cells = (f"{row[case].error:.0e}" if case in row else "-" for case in CASES)
            moved = min(p.moved for p in row.values())
            print(f"{name + suffix:20}" + "".join(f"{cell:>10}" for cell in cells) + f"{moved:10.2f}")
    print("\nrows with bf16 are stock Muon, whose own rounding is outside the bound")


def print_controls(controls: Sequence[Control]) -> None:
    print(f"\nthe same with one factor left at 1 ({CONTROL_STEPS} steps)\n")
    for name in dict.fromkeys(c.setup for c in controls):
        shown = (f"{c.key} {c.effect:.0e}" for c in controls if c.setup == name)
        print(f"{name:20}  " + "   ".join(shown))
    print("\nexcused, because the factor has no effect by nature\n")
    for (setup, key), reason in EXCUSES.items():
        effects = [c.effect for c in controls if (c.setup, c.key) == (setup, key)]
        if effects:
            print(f"{setup + ', ' + key:42}{max(effects):6.0e}  {reason}")


def measure(chosen: argparse.Namespace) -> Outcome:
    steps = QUICK_STEPS if chosen.quick else STEPS
    setups = [setup for name, setup in SETUPS.items() if chosen.only in name]
    if not setups:
        raise UsageError(
            f"no setup has {chosen.only!r} in its name; expected a part of one of {', '.join(SETUPS)}"
        )
    accepted = [(s.name, c.name) for s in setups for c in CASES.values() if s.accepts(c)]
    if chosen.quick and not chosen.only:
        accepted = every_third(accepted)
    muon = [(s, c) for s, c in accepted if s.startswith("Muon")]
    with pool(prepare=prepare_worker) as workers:
        futures = [workers.submit(measure_pair, setup, case, steps) for setup, case in accepted]
        rough = [workers.submit(measure_pair, setup, case, steps, stock=True) for setup, case in muon]
        wrong = [workers.submit(measure_controls, setup.name) for setup in setups]
        pairs, stock = ([f.result() for f in group] for group in (futures, rough))
        controls = [control for f in wrong for control in f.result()]
    print_pairs(pairs, stock)
    print_controls(controls)
    worst = max(p.error for p in pairs)
    smallest = min((c.effect for c in controls if (c.setup, c.key) not in EXCUSES), default=math.nan)
    failed = [*failures(pairs, controls), *(() if chosen.only else gaps(controls))]
    if not chosen.only and not chosen.quick and len(pairs) < PAIRS:
        failed.append(f"{len(pairs)} pairs, expected at least {PAIRS}")
    parted = sum(p.held < steps for p in pairs)
    return Outcome(f"pairs={len(pairs)} worst={worst:.1e} control={smallest:.1e} parted={parted}", failed)


if __name__ == "__main__":
    quick = option(
        "--quick", action="store_true", help=f"every third pair, {QUICK_STEPS} steps instead of {STEPS}"
    )
    only = option("--only", default="", help="part of a name in harness/setups.py, such as Lion")
    sys.exit(run(measure, quick, only, doc=__doc__))
