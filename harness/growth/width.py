"""Wider stock models at any size: rows of `benchmarks/growth.py` in which zeros follow the copies.

Where a norm averages over zeros, the control leaves out what the writers and gains absorb for that; where none does,
the control wakes every zero instead of all but those at a cut.
"""

from __future__ import annotations

from dataclasses import replace

import mupscale as mu
from harness.growth.rows import BARELY, LEAST, MOST, NAMES, SIZES, Figures, Make, Row, measure, summed_up
from harness.program import Outcome
from mupscale.families.record import FamilyPlan
from mupscale.plans.plan import Plan
from mupscale.rules.scale import Scale

TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite", "smollm3")
HIDDEN, ALL = "hidden=48", "hidden=48,heads=6,kv_heads=3,ffn=52"
TWICE = "hidden=80,heads=10,kv_heads=5,ffn=92"
FFN, DEEPER = "ffn=52", "layers=3,after=0,hidden=48"


def rows(quick: bool) -> list[Row]:
    if quick:
        return [Row("llama", "AdamW", ALL, tied=True)]
    found = [
        Row(kind, "AdamW", to, tied=tied) for kind in TYPES for to in (HIDDEN, ALL) for tied in (False, True)
    ]
    found += [Row("phi3", "AdamW", HIDDEN, tied=tied) for tied in (False, True)]
    found += [Row(kind, name, ALL) for kind in ("llama", "qwen3", "gemma") for name in ("SGD", "Muon")]
    found += [Row(kind, "AdamW", TWICE, tied=tied) for kind in ("llama", "gemma") for tied in (False, True)]
    found += [Row(kind, "AdamW", FFN) for kind in ("llama", "gemma")]
    found += [Row("llama", "Muon", TWICE, tied=True), Row("llama", "AdamW", DEEPER, "ffn=2", tied=True)]
    return found


def unscaled(family: FamilyPlan) -> Plan:
    """The plan without what its tensors absorb because norms average over zeros."""
    changes = {}
    for name, powers in family.powers.items():
        entry = family.plan[name]
        fold = entry.fold
        for dim, power in powers.items():
            fold = fold / Scale.of(entry.axes[dim].filled) ** power
        changes[name] = replace(entry, fold=fold)
    return family.plan.with_tensors(changes)


def uncut(plan: Plan) -> Plan:
    """The plan in which every zero wakes."""
    return plan.with_tensors({name: replace(entry, cut=()) for name, entry in plan.tensors.items()})


def control(family: FamilyPlan, run: mu.Run, make: Make) -> mu.Run:
    """Without what tensors absorb for the norms; where they absorb nothing, with every zero awake."""
    if family.powers:
        return mu.grow(run, make, plan=unscaled(family), prove=False)
    return mu.upscale(run, make, BARELY, plan=uncut(family.plan), prove=False)


def report(quick: bool) -> Outcome:
    def figures(row: Row) -> Figures:
        return measure(row, {**SIZES, "tie_word_embeddings": row.tied}, control)

    return summed_up(rows(quick), figures, NAMES, MOST, LEAST)
