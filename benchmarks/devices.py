"""What the library does on the CPU it does on another device: the same results, in the right places, without an error.

Each case runs on the CPU and on `harness.pretend_device`, a second torch device, in a process of its own; results have
the CPU's bits or are within 1e-6 of them, but for cases that name a larger bound with its reason. With `--no-float64`
the device refuses float64, as MPS does; cases that ask for float64 themselves must then be refused by that name.

    python benchmarks/devices.py [--quick] [--no-float64] [--only NAME] [--control NAME] [--list]

Three faults are planted, one at a time, each in front of a case that must then fail: `control=3/3`. `--control NAME`
runs all cases with one of them, and the program fails. The last line is `cases=… same=… failed=… control=…`.
"""

from __future__ import annotations

import argparse
import sys

import torch

from harness import pretend_device
from harness.devices import CASES
from harness.devices.case import Case
from harness.devices.controls import CONTROLS
from harness.devices.run import in_own_process, warm
from harness.program import Outcome, UsageError, option, run

LEAST = 150  # cases of a whole run


def chosen(options: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES.values() if options.only in case.name]
    if options.quick:
        cases = [case for case in cases if case.quick]
    if not cases:
        raise UsageError(f"no case has {options.only!r} in its name; --list prints the names")
    return cases


def controlled() -> list[str]:
    """The controls whose case fails with the fault and passes without it, on a device with float64: without it proofs are on the CPU."""
    found = []
    for name, (plant, seen_by) in CONTROLS.items():
        case = CASES[seen_by]
        with_fault, without = in_own_process(case, True, plant), in_own_process(case, True)
        noticed = without.same and not with_fault.same
        print(
            f"{'control':8} {name}: {case.name} {'fails' if noticed else 'DOES NOT TELL'}: {with_fault.words}",
            flush=True,
        )
        if noticed:
            found.append(name)
    return found


def measure(options: argparse.Namespace) -> Outcome:
    cases = chosen(options)
    if options.list:
        for case in cases:
            reasons = "; ".join(filter(None, (case.differs, case.asks_float64)))
            print(f"{case.name:64} {'quick' if case.quick else '':6} {reasons}")
        return Outcome("")
    reason = pretend_device.load()
    if reason is not None:
        return Outcome(f"left out: {reason}")
    torch.set_num_threads(1)
    warm()
    float64 = not options.no_float64
    plant = CONTROLS[options.control][0] if options.control else None
    same, failed = 0, []
    for case in cases:
        verdict = in_own_process(case, float64, plant)
        print(
            f"{'same' if verdict.same else 'FAILED':8} {case.name:64} {verdict.seconds:5.1f}s  {verdict.words}",
            flush=True,
        )
        same += verdict.same
        if not verdict.same:
            failed.append(f"{case.name}: {verdict.words}")
    whole = not (options.only or options.quick)
    if whole and len(cases) < LEAST:
        failed.append(f"{len(cases)} cases, expected at least {LEAST}")
    control = options.control
    if not control:
        noticed = [] if options.only else controlled()
        control = "-" if options.only else f"{len(noticed)}/{len(CONTROLS)}"
        if not options.only:
            failed += [f"the control {name} goes unnoticed" for name in CONTROLS if name not in noticed]
    line = f"cases={len(cases)} same={same} failed={len(cases) - same} control={control}"
    return Outcome(line, failed)


if __name__ == "__main__":
    sys.exit(
        run(
            measure,
            option("--quick", action="store_true", help="a named part of the cases, at most 90 CPU seconds"),
            option("--no-float64", action="store_true", help="the device refuses float64, as MPS does"),
            option("--only", default="", help="part of a case's name"),
            option(
                "--control",
                default="",
                choices=("", *CONTROLS),
                help="plant one fault; the cases must see it",
            ),
            option("--list", action="store_true", help="print the names of the cases and what may differ"),
            doc=__doc__,
        )
    )
