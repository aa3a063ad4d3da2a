"""The promised versions hold: the tests run on the oldest versions that pyproject.toml allows, and on the newest.

Makes an environment of its own with the Python that runs this script, in which every `>=` of the package and of its
extras is read as `==` (or, with `--newest`, left to the newest version in the registry), installs the package there and
runs the tests with a limit of memory per process. Warnings are no errors here: an old package warns about a new one,
and the reverse.

    python benchmarks/floor.py [--newest] [--environment DIR] [--gib 8] [TESTS …]

The last line is `python=V torch=V numpy=V transformers=V passed=N failed=N skipped=N`, and the failing tests stand above
it. The exit code is 1 when a test fails, 2 when the environment cannot be made. An environment that is there is used
as it is. Torch's own registry may bring gigabytes of CUDA; with PIP_EXTRA_INDEX_URL set to a registry of CPU wheels it
does not.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs before anything is installed

from harness.fresh_install import ROOT, requirements
from harness.program import Outcome, option, run

TOOLS = ["build", "hatchling", "hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist"]
SHOWN = ("torch", "numpy", "transformers")


def make(environment: Path, newest: bool) -> Path:
    """An environment with those versions and the package; its Python."""
    python = environment / "bin" / "python"
    if python.exists():
        return python
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(environment)],
        [*pip, *requirements(project, newest), *TOOLS],
        [*pip, "--no-deps", "-e", str(ROOT)],
    ):
        done = subprocess.run(command, check=False)
        if done.returncode:
            python.unlink(
                missing_ok=True
            )  # so that the next call does not take half an environment for a whole one
            raise SystemExit(2)
    return python


def versions(python: Path) -> dict[str, str]:
    """The versions that decide, as the environment itself states them."""
    code = f"import sys; from importlib.metadata import version; print(sys.version.split()[0], *map(version, {SHOWN}))"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(("python", *SHOWN), done.stdout.split(), strict=True))


def tested(python: Path, tests: list[str], gib: float) -> tuple[dict[str, int], list[str]]:
    """Run the tests, one process after the other: how many passed, and the names of those that did not."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-n0", "-W", "default", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
        options.append("--continue-on-collection-errors")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
        command = [str(python), "-m", "pytest", *options, *tests]
        subprocess.run(command, cwd=ROOT, env=environment, preexec_fn=limited, check=False)
        if not report.exists():
            raise SystemExit(2)
        return counted(ET.parse(report).getroot())


def counted(report: ET.Element) -> tuple[dict[str, int], list[str]]:
    """What a report in JUnit's format says: counts, and the failing tests with the last line of each error.

    >>> counted(ET.fromstring('<x><testcase classname="a" name="b"><failure message="no"/></testcase></x>'))
    ({'passed': 0, 'failed': 1, 'skipped': 0}, ['a::b: no'])
    """
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in report.iter("testcase"):
        fault = next((child for child in case if child.tag in ("failure", "error")), None)
        if fault is not None:
            first = re.sub(r"\s+", " ", fault.get("message", ""))[:160]
            failed.append(f"{case.get('classname')}::{case.get('name')}: {first}")
        skipped = fault is None and any(child.tag == "skipped" for child in case)
        counts["failed" if fault is not None else "skipped" if skipped else "passed"] += 1
    return counts, failed


def measure(chosen: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        python = make(chosen.environment or Path(folder) / "environment", chosen.newest)
        found = versions(python)
        counts, failed = tested(python, chosen.tests, chosen.gib)
    if not counts["passed"]:
        failed.append("no test passed")
    return Outcome(" ".join(f"{name}={value}" for name, value in (found | counts).items()), failed)


OPTIONS = (
    option("--newest", action="store_true", help="the newest versions instead of the oldest"),
    option("--environment", type=Path, help="where to make it, and keep it"),
    option("--gib", type=float, default=8.0, help="memory that one process may have"),
    option("tests", nargs="*", help="which tests; all of them when none is named"),
)

if __name__ == "__main__":
    sys.exit(run(measure, *OPTIONS, doc=__doc__))
