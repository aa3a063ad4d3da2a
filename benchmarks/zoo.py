"""No model of the zoo grows silently wrong: every path that a user may take is exact or refused.

Each model is trained in float64, grown with zero noise by the shortest call, with a loss, with example inputs, and by
what a refusal tells to write, and continues next to its base. A path is silent when it does not refuse and the losses
differ; a remedy is wrong when it was printed and gives such a run; verify gives a false alarm when it denies an exact
one. `--control` switches proofs off: the zoo must then show what the proofs are for.

    python benchmarks/zoo.py [--quick] [--control | --prove] [--only NAME] [--dtype float32] [--again] [--list]
    python benchmarks/zoo.py --loops [--only NAME] [--list]

A full run is kept in benchmarks/zoo.jsonl, one line per model, and resumed as long as the code is the same. The last
line is `models=… exact=… refused=… dropout=… silent=… remedy_wrong=… false_alarms=… share=…`; the exit code is 1 when
a bound fails.

`--loops` measures what is around a model: hooks, counters, frozen parts, schedules, several optimizers, wrappers, saved
plans. Each situation is exact, or a warning or the provenance says what changes, or it is refused and the remedy, typed,
gives an exact run. All of them are measured again with carrying and checks switched off. The last line is
`situations=… silent=… remedy_wrong=… false_alarms=… crashed=… control=…`.
"""

from __future__ import annotations

import argparse
import sys

import torch

from harness.evidence import key_of
from harness.loops import LOOPS
from harness.loops import measure as loops
from harness.loops import results as loop_results
from harness.program import Outcome, UsageError, option, run
from harness.zoo import ZOO
from harness.zoo.entry import Entry, Exact
from harness.zoo.measure import Line, measured
from harness.zoo.results import MODELS, QUICK, failures, store, stored, summary


def shown(line: Line) -> str:
    cells = (f"{path} {o.kind}{'' if o.gap is None else f' {o.gap:.0e}'}" for path, o in line.paths.items())
    alarm = "   FALSE ALARM" if line.false_alarm else ""
    return f"{line.name:38} {line.kind:8} {line.seconds:6.1f}s  {'   '.join(cells)}{alarm}"


def chosen_entries(options: argparse.Namespace) -> list[Entry]:
    entries = [e for e in ZOO.values() if options.only in e.name]
    if options.quick:
        entries = [e for e in entries if e.name in QUICK]
    if options.prove:
        entries = [e for e in entries if isinstance(e.judgement, Exact)]
    return entries


def measure_loops(options: argparse.Namespace) -> Outcome:
    """Every situation, and its control."""
    chosen = [situation for name, situation in LOOPS.items() if options.only in name]
    if not chosen:
        raise UsageError(f"no situation has {options.only!r} in its name; --list prints the names")
    if options.list:
        for situation in chosen:
            print(f"{situation.pattern:4} {situation.name:60} {situation.judgement}")
        return Outcome("")
    loops.prepare()
    found, control = [], []
    for situation in chosen:
        line, other = loops.measured(situation.name), loops.measured(situation.name, control=True)
        gap = "" if line.gap is None else f"{line.gap:.0e}"
        print(
            f"{situation.pattern:4} {line.name:60} {line.kind:8} {gap:6} control {other.kind:8} "
            f"{line.seconds + other.seconds:5.2f}s  {line.verdict.upper()} {line.said if line.verdict else ''}",
            flush=True,
        )
        found.append(line)
        control.append(other)
    numbers = loop_results.summary(found, control)
    failed = list(loop_results.failures(numbers, found, whole=not options.only))
    return Outcome(" ".join(f"{word}={value}" for word, value in numbers.items()), failed)


def measure(options: argparse.Namespace) -> Outcome:
    if options.loops:
        return measure_loops(options)
    entries = chosen_entries(options)
    if not entries:
        raise UsageError(f"no model has {options.only!r} in its name; --list prints the names")
    if options.list:
        for entry in entries:
            print(f"{entry.name:38} {entry.judgement}")
        return Outcome("")
    mode = "control" if options.control else "prove" if options.prove else "paths"
    whole = not options.only
    keeps = whole and not options.quick
    key = key_of("zoo")
    known = stored(key) if keeps and not options.again else {}
    lines = []
    for entry in entries:
        if not entry.available:
            continue
        line = known.get((entry.name, mode, options.dtype))
        if line is None:
            line = measured(entry.name, mode, getattr(torch, options.dtype))
            if keeps:
                store(line, key)
        print(shown(line), flush=True)
        lines.append(line)
    for package in sorted({e.needs for e in entries if not e.available}):
        print(f"skipped: {package} is not installed")
    numbers = summary(lines, entries)
    failed = list(failures(numbers, mode, options.quick, whole))
    if keeps and len(lines) < MODELS and mode == "paths":
        failed.append(f"{len(lines)} models, expected at least {MODELS}")
    return Outcome(" ".join(f"{word}={value}" for word, value in numbers.items()), failed)


if __name__ == "__main__":
    sys.exit(
        run(
            measure,
            option("--quick", action="store_true", help=f"{len(QUICK)} fast models; nothing is stored"),
            option("--control", action="store_true", help="the shortest call with proofs switched off"),
            option(
                "--prove", action="store_true", help="measure the stored plans of the models judged exact"
            ),
            option("--loops", action="store_true", help="situations around a model, with their control"),
            option("--only", default="", help="part of a name; nothing is stored"),
            option("--dtype", default="float64", choices=("float64", "float32")),
            option("--again", action="store_true", help="measure what is stored already"),
            option("--list", action="store_true", help="print names and judgements, and measure nothing"),
            doc=__doc__,
        )
    )
