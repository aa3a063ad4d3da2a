"""Deeper and wider stock models: a grown run is its base's until noise wakes what is new, and waking changes no loss.

    python benchmarks/growth.py                every type, tied and untied, AdamW, SGD and Muon, new blocks in three places
    python benchmarks/growth.py --quick        a few of them
    python benchmarks/growth.py --only words   one kind of growth

The rows are in `harness/growth/`, one file for each kind; `rows.py` says what a row is. Figures of the other kinds come
first, as `width: rows=R worst=W …`, `units: …`, `words: …`, `experts: …`, `copies: …`, `multiplied: …` (experts and top-k together) and
`more: …` (more experts, of which a token goes to as few as before). `--only path` takes one tiny Llama through five kinds of growth by
the command line; it is in no run of all kinds.

The last line is `rows=R depth=D biases=B worst=W control=C jump=J woken=S`: the largest relative error over losses,
gradients and weights of the rows that only grow deeper, that of those among them whose biases are split, that of all
rows, the least deviation of a control, the largest change of a loss on waking, and the smallest share of a
tensor's new entries that have a gradient in one of the steps after the first; with --only, it is that of the kind. The exit
code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from harness.growth import depth, experts, more_experts, path, units, width, words
from harness.program import Outcome, option, run

KINDS = {
    "width": width.report,
    "units": units.report,
    "words": words.report,
    "experts": experts.report,
    "copies": experts.report_copies,
    "multiplied": experts.report_multiplied,
    "more": more_experts.report,
    "depth": depth.report,
    "path": path.report,
}


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    failed, line = [], ""
    for name in [chosen.only] if chosen.only else [kind for kind in KINDS if kind != "path"]:
        if line:
            print(f"\n{line}\n", flush=True)
        found = KINDS[name](chosen.quick)
        line = f"{name}: {found.line}"
        failed += [f"{name}: {text}" for text in found.failed]
    return Outcome(line.partition(": ")[2], failed)


if __name__ == "__main__":
    sys.exit(
        run(
            measure,
            option("--quick", action="store_true", help="a few rows"),
            option("--only", choices=KINDS, help="one kind of growth"),
            doc=__doc__,
        )
    )
