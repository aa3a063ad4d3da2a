"""Deeper and wider stock models: a grown run is its base's until noise wakes what is new, and waking changes no loss.

    python benchmarks/growth.py            every type, tied and untied, AdamW, SGD and Muon, new blocks in three places
    python benchmarks/growth.py --quick    a few of them

What a row is, `growth_rows.py` says. The control is the same growth with the new blocks' readers copied from their
neighbours and their writers zero, as block expansion does it: outputs are the base's, and training leaves it. Rows with a
width grow deeper and wider in one plan.

Rows of widths at any size are in `growth_width.py`, those of words and positions in `growth_words.py`, and those of dense
models that get experts in `growth_experts.py`; their figures come first, as `width: rows=R worst=W …`, `words: …`,
`experts: …` and `copies: …`.

The last line is `rows=R depth=D biases=B worst=W control=C jump=J woken=S`: the largest relative error over losses,
gradients and weights of the rows that only grow deeper, that of those among them whose biases are split, that of all
rows, the least deviation of a control, the largest change of a loss on waking, and the smallest share of a
tensor's new entries that have a gradient in one of the steps after the first. The exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import mupscale as mu
from benchmarks import growth_experts, growth_words
from benchmarks.growth_rows import SIZES, WITH_BIASES, Make, Row, measured, together
from benchmarks.growth_width import measure_widths
from mupscale.families.record import FamilyPlan
from mupscale.plans.plan import Plan

DEPTH, BIASES = 0.0, 1e-12
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
    return mu.widen(run, make, plan=copied(family.plan), unproved=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few rows")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    widths = measure_widths(quick)
    wider = together(widths)
    print(f"\nwidth: rows={len(widths)} {wider}\n", flush=True)
    words, words_hold = growth_words.report(quick)
    print(f"\nwords: {words}\n", flush=True)
    mixed, experts_hold = growth_experts.report(quick)
    print(f"\nexperts: {mixed}\n", flush=True)
    copied_line, copies_hold = growth_experts.report_copies(quick)
    print(f"\ncopies: {copied_line}\n", flush=True)
    found = measured(((row, sizes(row)) for row in rows(quick)), control)
    deeper = together(found.values())
    deep = {row: m.worst for row, m in found.items() if row.k == "1"}
    depth = max(error for row, error in deep.items() if row.kind not in WITH_BIASES)
    biases = max(error for row, error in deep.items() if row.kind in WITH_BIASES)
    print(f"\nrows={len(found)} depth={depth:.1e} biases={biases:.1e} {deeper}")
    others = wider.holds and words_hold and experts_hold and copies_hold
    return 0 if others and deeper.holds and depth <= DEPTH and biases <= BIASES else 1


if __name__ == "__main__":
    sys.exit(main())
