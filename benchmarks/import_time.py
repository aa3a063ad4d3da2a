"""`import mupscale` loads no torch; with its first use it takes at most 1.15 times as long as `import torch`.

Fresh processes, each of which imports torch, then `mupscale` and what a first growth uses (Run, widen, upscale, verify)
with every extra's package blocked as if it were not installed, then an extra that is there, which is the control.
Ratios are taken within a process, since one process can take twice as long as the next on a shared machine; their
median is printed. Times are the processor's. The package is compiled first, as pip does when it installs it.

    python benchmarks/import_time.py [--rounds 7]

The last line is `torch=S mupscale=S ratio=R control=R loaded=N`: seconds, the ratio, the ratio with an extra, and how
many packages are loaded that should not be: torch by the import alone, those of extras by the first use. The exit
code is 1 when the ratio is above the bound, the control is not seen, or such a package is loaded; 2 when no extra is installed to be the control.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mupscale.extras import EXTRAS

BOUND, SEEN = 1.15, 0.05
PACKAGES = tuple(package for extra in EXTRAS.values() for package in extra.packages)
CONTROLS = ("matplotlib.figure", "optuna", "transformers.trainer", "lightning")


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
mu.Run, mu.widen, mu.upscale, mu.verify; second = process_time()
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
mu.Run, mu.widen, mu.upscale, mu.verify
print(*early, *(p for p in {PACKAGES!r} if p in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is imported")
    rounds = parser.parse_args().rounds
    control = next((name for name in CONTROLS if find_spec(name.partition(".")[0])), None)
    if control is None:
        print("needs an extra to be the control: pip install 'mupscale[plot]'")
        return 2
    with TemporaryDirectory() as folder:
        environment = compiled(Path(folder))
        seconds(control, environment)  # for the caches of files
        taken = [seconds(control, environment) for _ in range(rounds)]
    torch, mupscale = (median(row[i] for row in taken) for i in (0, 1))
    ratio, with_extra = (median(row[i] / row[0] for row in taken) for i in (1, 2))
    for row in taken:
        print("torch {:.2f} s, mupscale {:.2f}, with an extra {:.2f}".format(*row))
    extras = loaded()
    failed = []
    if not ratio <= BOUND:
        failed.append(f"{ratio:.3f} times as long as torch, allowed {BOUND}")
    if not with_extra >= ratio + SEEN:
        failed.append(f"importing {control} as well is not seen: {with_extra:.3f} against {ratio:.3f}")
    if extras:
        failed.append(f"import mupscale loads {', '.join(extras)}")
    for failure in failed:
        print(f"FAILED: {failure}")
    print(
        f"\ntorch={torch:.2f} mupscale={mupscale:.2f} ratio={ratio:.3f} "
        f"control={with_extra:.3f} loaded={len(extras)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
