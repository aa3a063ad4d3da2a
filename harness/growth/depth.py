"""Deeper stock models, some of them wider too: rows of `benchmarks/growth.py` with new blocks in three places.

The control is the same growth with the new blocks' readers copied from their neighbours and their writers zero, as block
expansion does it: outputs are the base's, and training leaves it. Rows with a width grow deeper and wider in one plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mupscale as mu
from harness.growth.rows import LEAST, MOST, NAMES, SIZES, WITH_BIASES, Figures, Make, Row, measure, summed_up
from harness.program import Outcome
from mupscale.families.record import FamilyPlan
from mupscale.plans.plan import Plan

DEEPER = {"depth": 0.0, "biases": 1e-12}
TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "smollm3", "phi3", "olmo2",
)  # fmt: skip
PLACES = ("layers=3,after=0", "layers=3,after=1", "layers=4")


def rows(quick: bool) -> list[Row]:
    if quick:
        return [
            Row("llama", "AdamW", PLACES[2]),
            Row("olmo2", "SGD", PLACES[0]),
            Row("gemma2", "Muon", PLACES[0], "2"),
            Row("gpt2", "AdamW", PLACES[2]),
        ]
    deep = [Row(kind, "AdamW", to) for kind in TYPES for to in PLACES]
    tied = [Row(kind, "AdamW", PLACES[0], tied=True) for kind in ("llama", "qwen3", "gemma", "granite")]
    other = [
        Row(kind, optimizer, PLACES[2])
        for kind in ("llama", "gemma2", "olmo2")
        for optimizer in ("SGD", "Muon")
    ]
    both = [
        Row(kind, "AdamW", PLACES[0], k)
        for kind in ("llama", "qwen3", "granite", "olmo2")
        for k in ("2", "ffn=3")
    ]
    both += [replace(row, tied=True, optimizer="Muon") for row in both[:2]]
    biased = [Row(kind, "AdamW", to) for kind in WITH_BIASES for to in (PLACES[0], PLACES[2])]
    biased += [Row("gpt2", "SGD", "layers=5,after=0:0:1"), Row("gpt2", "AdamW", PLACES[0], "2")]
    return [*biased, *deep, *tied, *other, *both]


def copied(plan: Plan) -> Plan:
    """The plan with new blocks whose readers are copies: the control."""
    readers = {n: t for n, t in plan.tensors.items() if t.new and not t.quiet and t.like is not None}
    return plan.with_tensors({n: replace(t, sources=(str(t.like),), like=None) for n, t in readers.items()})


def sizes(row: Row) -> dict[str, Any]:
    return WITH_BIASES.get(row.kind, {**SIZES, "tie_word_embeddings": row.tied})


def control(family: FamilyPlan, run: mu.Run, make: Make) -> mu.Run:
    return mu.grow(run, make, plan=copied(family.plan), prove=False)


def figures(row: Row) -> Figures:
    found = measure(row, sizes(row), control)
    if row.k == "1":
        found["biases" if row.kind in WITH_BIASES else "depth"] = found["worst"]
    return found


def report(quick: bool) -> Outcome:
    return summed_up(rows(quick), figures, f"depth biases {NAMES}", {**DEEPER, **MOST}, LEAST)
