"""`mupscale doctor`: what this installation has, what it lacks, and whether widening is exact on this machine.

Reads versions without importing the packages, so a broken package cannot break it; only torch is imported, for the
test of the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from ..extras import EXTRAS
from ..tensors.differences import curve_gap
from ..text import columns, size
from ..training.check import device_proofs
from ..training.check.demo import DIFFERENT, EXACT, train
from ..version import __version__

CORE = ("torch", "numpy", "safetensors")
_TESTS = "tests that need a GPU: in a clone of the repository, python -m pytest -m gpu"
_STEPS = 30  # after growth, side by side, as many as before it


def run(chosen: argparse.Namespace) -> int:
    least = minimums()
    print(columns([*_machine(chosen.disk), *_core(least)], indent=0) + "\n")
    print(columns([("extra", "has", "enables"), *(_extra(name, least) for name in EXTRAS)], indent=0) + "\n")
    missing = [name for name, extra in EXTRAS.items() if None in map(installed, extra.packages)]
    if missing:
        print(f"for what is missing: pip install 'mupscale[{','.join(missing)}]'")
    old = [name for name in least if is_older(installed(name), least[name])]
    if old:
        print(f"too old: pip install --upgrade {' '.join(repr(f'{name}>={least[name]}') for name in old)}")
    exact, control = _measured()
    holds = exact <= EXACT and control >= DIFFERENT
    print(
        f"widening an MLP: {'exact' if holds else 'NOT exact'} on this machine; losses differ by {exact:.0e}, "
        f"with the base's rates and eps by {control:.0e}"
    )
    chosen.found = {
        "versions": {name: installed(name) for name in least},
        "too_old": old,
        "widening": {"exact": exact, "control": control, "holds": holds},
    }
    if chosen.device is not None:
        holds = _holds_on(chosen.device) and holds
    return 0 if holds and not old else 1


def _machine(disk: Path) -> list[tuple[str, str]]:
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={threads}" if threads else ""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = (
        "no accelerator"
        if accelerator is None
        else f"{torch.accelerator.device_count()} devices of {accelerator.type}"
    )
    return [
        ("mupscale", f"{__version__} in {Path(__file__).resolve().parents[1]}"),
        ("python", f"{platform.python_version()} in {sys.prefix}"),
        ("machine", f"{platform.system()} {platform.machine()}, {devices}"),
        ("threads", f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores{limit}"),
        ("disk", f"{size(shutil.disk_usage(disk).free)} free in {disk.resolve()}"),
    ]


def _core(least: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, _found(name, least)) for name in CORE]


def _extra(extra: str, least: dict[str, str]) -> tuple[str, str, str]:
    packages = EXTRAS[extra].packages
    return extra, ", ".join(f"{name} {_found(name, least)}" for name in packages), EXTRAS[extra].enables


def _found(name: str, least: dict[str, str]) -> str:
    found = installed(name)
    if found is None:
        return "missing"
    return f"{found} (needs {least[name]})" if is_older(found, least.get(name)) else found


def installed(name: str) -> str | None:
    """The version of a package that is installed, or None.

    >>> installed("no-such-package") is None
    True
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def minimums() -> dict[str, str]:
    """The oldest versions that are supported, as the package's own metadata states them.

    >>> minimums()["torch"]
    '2.9'
    """
    try:
        stated = requires("mupscale") or []
    except PackageNotFoundError:  # run from its source, without an installation
        return {}
    found = (re.match(r"([\w.-]+)(?:\[[^]]*])?\s*>=\s*([\d.]+)", line) for line in stated)
    return {match[1].lower(): match[2] for match in found if match}


def is_older(found: str | None, least: str | None) -> bool:
    """Whether a version is below the oldest that is supported; what follows its numbers does not count.

    >>> is_older("2.13.0+cpu", "2.7"), is_older("2.6.1", "2.7"), is_older(None, "2.7")
    (False, True, False)
    """
    if found is None or least is None:
        return False
    have, want = ([int(n) for n in re.findall(r"\d+", v.partition("+")[0])] for v in (found, least))
    return have < want


def _measured() -> tuple[float, float]:
    """The largest relative difference of a loss from the base's: widened, and with the base's settings left unchanged."""
    _, base, wide, control = train(_STEPS, before=30)
    return curve_gap(base, wide), curve_gap(base, control)


def _holds_on(name: str) -> bool:
    """Print the report of a device, to paste into an issue; whether every proof holds."""
    device = device_proofs.found_device(name)
    print(f"\n```\nmupscale device report: {device_proofs.described(device)}")
    holds = True
    for check in device_proofs.checks(device):
        holds = check.holds and holds
        print(f"{check.name:18} {'holds' if check.holds else 'FAILS'}  {check.found}", flush=True)
    print(f"time: {device_proofs.timing(device)}")
    print(f"{_TESTS}\n```")
    return holds
