"""`import mupscale` loads no torch; with its first use it takes at most 1.15 times as long as `import torch`.

Fresh processes, each of which imports torch, then `mupscale` and what a first growth uses (Run, grow, upscale, verify)
with every extra's package blocked as if it were not installed, then an extra that is there, which is the control.
Ratios are taken within a process, since one process can take twice as long as the next on a shared machine; their
median is printed. Times are the processor's. The package is compiled first, as pip does when it installs it.

    python benchmarks/import_time.py [--rounds 7]
    python benchmarks/import_time.py --commands    help and refused arguments, over a bare `python -c pass`

The last line is `torch=S mupscale=S ratio=R control=R loaded=N`: seconds, the ratio, the ratio with an extra, and how
many packages are loaded that should not be: torch by the import alone, those of extras by the first use. With --commands
it is `help=R refusal=R version=R control=R`: the ratio of each command to a bare process next to it; the control imports
torch. The exit code is 1 when a bound fails or a control is not seen; 2 when no extra is installed to be the control.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from harness.fresh_install import cpu_seconds
from harness.program import Outcome, UsageError, option, run
from mupscale.extras import EXTRAS

BOUND, SEEN = 1.15, 0.05
PACKAGES = tuple(package for extra in EXTRAS.values() for package in extra.packages)
CONTROLS = ("matplotlib.figure", "optuna", "transformers.trainer", "lightning")
COMMAND_BOUND = 6.0
"""Times a bare interpreter. argparse and the options take about three times as long; torch takes a hundred."""
SCRIPT = ["-c", "import sys; from mupscale.cli.main import main; sys.exit(main())"]
"""What the script that pip installs does."""
COMMANDS = {
    "help": [*SCRIPT, "upscale", "--help"],
    "refusal": [*SCRIPT, "upscale", "base", "wide", "-k", "1.5", "--noise", "t=0.05"],
    "version": [*SCRIPT, "--version"],
    "control": ["-c", "import torch"],
}


def compiled(folder: Path) -> dict[str, str]:
    """An environment in which `mupscale` is a compiled copy, whatever this tree has in its caches."""
    source = Path(__file__).resolve().parents[1] / "src" / "mupscale"
    shutil.copytree(source, folder / "mupscale", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)
    return {**os.environ, "PYTHONPATH": str(folder)}


def seconds(control: str, environment: Mapping[str, str]) -> tuple[float, float, float]:
    """Processor seconds of a fresh process until torch, then mupscale, then an extra are there."""
    code = f"""
import sys; from time import process_time
start = process_time(); import torch; first = process_time()
sys.modules.update(dict.fromkeys({PACKAGES!r})); import mupscale as mu
mu.Run, mu.grow, mu.upscale, mu.verify; second = process_time()
for name in {PACKAGES!r}: sys.modules.pop(name)
import {control}; print(first - start, second - start, process_time() - start)
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
    torch, mupscale, extra = map(float, found.stdout.split())
    return torch, mupscale, extra


def loaded() -> list[str]:
    """Packages that nobody asked for: torch at the import, those of extras at the first use."""
    code = f"""
import sys, mupscale as mu
early = [p for p in ("torch", "numpy") if p in sys.modules]
mu.Run, mu.grow, mu.upscale, mu.verify
print(*early, *(p for p in {PACKAGES!r} if p in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.split()


def command_seconds(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> float:
    """Processor seconds of one fresh process, its system time included."""
    before = cpu_seconds()
    subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, check=False
    )
    return cpu_seconds() - before


def commands(rounds: int, environment: Mapping[str, str], folder: Path) -> Outcome:
    """How long help, a refusal and the version take, over a bare interpreter."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            bare = command_seconds(["-c", "pass"], environment, folder)
            found[name].append(command_seconds(arguments, environment, folder) / bare)
    ratios = {name: median(values) for name, values in found.items()}
    failed = [
        f"{name} takes {ratio:.1f} times as long as a bare interpreter, the bound is {COMMAND_BOUND}"
        for name, ratio in ratios.items()
        if (ratio <= COMMAND_BOUND) is (name == "control")
    ]
    return Outcome(" ".join(f"{name}={ratio:.1f}" for name, ratio in ratios.items()), failed)


def imports(rounds: int, environment: Mapping[str, str]) -> Outcome:
    """How long the import and the first use take, over the import of torch."""
    control = next((name for name in CONTROLS if find_spec(name.partition(".")[0])), None)
    if control is None:
        raise UsageError("needs an extra to be the control: pip install 'mupscale[plot]'")
    seconds(control, environment)  # for the caches of files
    taken = [seconds(control, environment) for _ in range(rounds)]
    torch, mupscale = (median(row[i] for row in taken) for i in (0, 1))
    ratio, with_extra = (median(row[i] / row[0] for row in taken) for i in (1, 2))
    for row in taken:
        print("torch {:.2f} s, mupscale {:.2f}, with an extra {:.2f}".format(*row))
    extras = loaded()
    bounds = {
        f"{ratio:.3f} times as long as torch, allowed {BOUND}": ratio <= BOUND,
        f"importing {control} as well is not seen: {with_extra:.3f} against {ratio:.3f}": with_extra
        >= ratio + SEEN,
        f"import mupscale loads {', '.join(extras)}": not extras,
    }
    line = f"torch={torch:.2f} mupscale={mupscale:.2f} ratio={ratio:.3f} control={with_extra:.3f} loaded={len(extras)}"
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


def measure(chosen: argparse.Namespace) -> Outcome:
    with TemporaryDirectory() as folder:
        environment = compiled(Path(folder))
        if chosen.commands:
            return commands(chosen.rounds, environment, Path(folder))
        return imports(chosen.rounds, environment)


if __name__ == "__main__":
    rounds = option("--rounds", type=int, default=7, help="how often each is started")
    only = option("--commands", action="store_true", help="measure commands instead of imports")
    sys.exit(run(measure, rounds, only, doc=__doc__))
