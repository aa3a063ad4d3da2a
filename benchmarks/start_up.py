"""Help and refused arguments come at once: processor time of the command line over that of a bare `python -c pass`.

Fresh processes, the bare one beside each, since one process can take twice as long as the next on a shared machine; the
median of the ratios is printed. The package is compiled first, as pip does when it installs it. The control is a command
that imports torch.

    python benchmarks/start_up.py [--rounds 5]

The last line is `help=R refusal=R version=R control=R`. The exit code is 1 when one of the first three is above the
bound, or the control is not.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.import_time import compiled

BOUND = 6.0
"""Times a bare interpreter. argparse and the options take about three times as long; torch takes a hundred."""
SCRIPT = ["-c", "import sys; from mupscale.cli.main import main; sys.exit(main())"]
"""What the script that pip installs does."""
COMMANDS = {
    "help": [*SCRIPT, "upscale", "--help"],
    "refusal": [*SCRIPT, "upscale", "base", "wide", "-k", "1.5", "--noise", "t=0.05"],
    "version": [*SCRIPT, "--version"],
    "control": ["-c", "import torch"],
}


def seconds(arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> float:
    """Processor seconds of one fresh process, its system time included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is started")
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with TemporaryDirectory() as folder:
        environment = compiled(Path(folder))
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                bare = seconds(["-c", "pass"], environment, folder)
                found[name].append(seconds(arguments, environment, folder) / bare)
    ratios = {name: median(values) for name, values in found.items()}
    print(" ".join(f"{name}={ratio:.1f}" for name, ratio in ratios.items()))
    return int(not all((ratio <= BOUND) is (name != "control") for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
