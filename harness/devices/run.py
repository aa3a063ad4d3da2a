"""Each case in a process of its own, forked from one that has imported everything and has not yet run a backward pass."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import pretend_device
from harness.devices.case import Case
from harness.devices.compare import compared

SECONDS = 300
"""Wall time for one case, several times what the slowest takes on a busy machine."""


class Verdict(NamedTuple):
    """Whether a case gave the same on both devices, in a few words, and the CPU seconds it took."""

    same: bool
    words: str
    seconds: float = 0.0


class Attempt(NamedTuple):
    """What a case did on one device: a result or an error, and its warnings."""

    result: Any
    error: BaseException | None
    warned: frozenset[str]


def warm() -> None:
    """Import what most cases import, so that their processes need not; nothing is computed."""
    import torch._dynamo  # noqa: F401 - torch's optimizers import it when they are first made

    for name in (
        "planning.infer",
        "planning.deeper",
        "training.grow.prove",
        "training.grow.auto_noise",
        "training.grow.upscale",
        "training.check.verify",
    ):
        importlib.import_module(f"mupscale.{name}")
    importlib.import_module("mupscale.diagnostics")


def _where(error: BaseException) -> str:
    """The innermost lines of the library that an error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/mupscale/" in f.filename]
    return " < ".join(f"{f.filename.split('/mupscale/')[-1]}:{f.lineno}" for f in reversed(frames[-3:]))


def attempted(case: Case, device: str) -> Attempt:
    torch.manual_seed(0)
    result: Any = None
    error: BaseException | None = None
    with (
        warnings.catch_warnings(record=True) as caught,
        sdpa_kernel(SDPBackend.MATH),
    ):  # the device has no other
        warnings.simplefilter("always")
        # A kernel of the CPU resizes what torch hands it for the device; a GPU has kernels of its own.
        warnings.filterwarnings("ignore", message="An output with one or more elements was resized")
        try:
            result = case.work(torch.device(device))
        except Exception as found:
            error = found
    return Attempt(result, error, frozenset(str(w.message)[:80] for w in caught))


def judged(case: Case, float64: bool) -> Verdict:
    """Run a case on the CPU and on its device, and compare."""
    pretend_device.float64(float64)
    here = attempted(case, "cpu")
    there = attempted(case, case.device)
    if here.error is not None:
        return Verdict(False, f"fails on the CPU: {_said(here.error)}")
    if case.asks_float64 and not float64:
        if there.error is None:
            return Verdict(False, "not refused, though it asks for float64")
        named = "float64" in str(there.error)
        return Verdict(
            named, f"{'refused by name' if named else 'refused without a name'}: {_said(there.error)}"
        )
    if there.error is not None:
        return Verdict(False, _said(there.error))
    difference = compared(case, here.result, there.result)
    # A warning that names the device is a fault on the CPU too: a run there has nothing to do with it.
    new = {t for t in here.warned | there.warned if pretend_device.NAME in t.casefold()} | (
        there.warned - here.warned
    )
    faults = [*difference.faults, *(f"warns: {text}" for text in sorted(new))]
    if faults:
        return Verdict(False, f"{len(faults)} faults: {'; '.join(faults[:3])}")
    return Verdict(True, "same bits" if difference.bits else f"within {difference.largest:.0e}")


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} [{_where(error) or 'the case itself'}]"


def in_own_process(case: Case, float64: bool, plant: Callable[[], None] | None = None) -> Verdict:
    """The verdict of a forked process, with a fault planted in it if one is given."""
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            signal.alarm(SECONDS)
            # Makes torch's pool of threads anew, which a fork has lost: the threads of two devices would do so at once.
            torch.set_num_threads(1)
            if plant is not None:
                plant()
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                verdict = judged(case, float64)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(tuple(verdict), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        sent = pipe.read()
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if not sent:
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an error"
        return Verdict(False, f"crashed: ended by {ended}", seconds)
    same, words, _ = pickle.loads(sent)
    return Verdict(same, words, seconds)
