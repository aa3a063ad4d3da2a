"""The 115 model types that are used most, planned, proved, grown, reloaded in the stock class and trained on.

    python benchmarks/families_popular.py               what is not stored in families_popular.jsonl yet; --again, all of it
    python benchmarks/families_popular.py --part 1/16   one part of the types, compared with what is stored
    python benchmarks/families_popular.py --only llama,llava
    python benchmarks/families_popular.py --by units    by new units: exact asleep, and which loss jumps when they wake

What happens to a type, and what its line must show, `harness/popular.py` says. The last line is
`types=T exact=E ffn_only=F refused=R crashed=C slow=S`; the exit code is 1 when a line does not show what it must, or a
verdict differs from the stored one. By units it is
`types=T units=U mixed=M copies=C refused=R jumps=J crashed=X slow=S silent=N`: types that grow by units in every width, by units
and copies, or by copies alone; those that are refused, of which each is tried by copies; those whose loss moves when they wake; and
those that are accepted and not exact.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils.logging import disable_progress_bar

from harness.evidence import is_of, key_of
from harness.popular import (
    STORED,
    STORED_UNITS,
    faults,
    in_part,
    measured,
    stored,
    summary,
    towers_of,
    wrong,
    wrong_units,
)
from harness.popular_types import POPULAR
from harness.program import Outcome, option, run
from mupscale.families.config.multipliers import TOWERS


def measure(chosen: argparse.Namespace) -> Outcome:
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401 - imported once, before children are forked

    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    by, file = chosen.by, STORED if chosen.by == "copies" else STORED_UNITS
    only, part, before = chosen.only.split(",") if chosen.only else None, chosen.part, stored(file)
    cases = {
        c.name: c for c in POPULAR if (not only or c.name in only) and (part is None or in_part(c.name, part))
    }
    whole = part is None and not only
    key = key_of("families_popular")
    current = {name: line for name, line in before.items() if is_of(key, line)}
    lines = current if whole and not chosen.again else {}
    failed = []
    for name, case in cases.items():
        if name in lines:
            continue
        line = lines[name] = measured(case, by)
        print(f"{name:20} {line['verdict']:9} {line['seconds']:5.1f} s  {line['why'][:230]}", flush=True)
        if part is None:
            before[name] = line
            text = "".join(json.dumps(before[c.name]) + "\n" for c in POPULAR if c.name in before)
            file.write_text(text, encoding="utf-8")
        elif line["verdict"] != before.get(name, line)["verdict"]:
            failed.append(f"{name} was {before[name]['verdict']} and is {line['verdict']}")
    if whole:
        failed += faults(lines, by)
    elif by == "units":
        failed += [f"{n}: {what}" for n, line in lines.items() for what in wrong_units(line)]
    else:
        failed += [f"{n}: {what}" for n, line in lines.items() for what in wrong(line, towers_of(cases[n]))]
    if grown := [line["towers"] for line in lines.values() if "towers" in line]:
        counts = " ".join(f"{tower}={sum(tower in of for of in grown)}" for tower in TOWERS)
        print(f"towers: types={len(grown)} {counts}")
    return Outcome(summary(lines.values(), by), failed)


if __name__ == "__main__":
    part = option("--part", help="part i/n of the types, by a hash of their names; nothing is stored")
    again = option("--again", action="store_true", help="measure what is stored too")
    only = option("--only", help="types, separated by commas")
    by = option("--by", choices=("copies", "units"), default="copies", help="how widths grow")
    sys.exit(run(measure, part, again, only, by, doc=__doc__))
