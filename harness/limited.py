"""An action in a forked process with little memory and time, so that one that fails cannot take the machine.

Knows: fork, resource limits and exit codes. Returns what the action returned, as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANG, MEMORY = "hang", "memory"
CPU_SECONDS, MEMORY_BYTES = 2, 200 << 20
"""What an input may take above the start of the call."""
_ADDRESSES = 4  # times the memory that is allowed: threads reserve addresses that they never touch
_WAITING = 60  # seconds on the clock for each of CPU: an action that waits for ever is ended too


@dataclass(frozen=True)
class Outcome:
    """How an action ended: `done` with its value, or `failed` with the name of an exception, HANG or MEMORY."""

    done: bool
    value: Any
    seconds: float
    """CPU seconds of the process, from the fork."""
    memory: int
    """The most bytes of memory that it had above what it started with."""


def limited(action: Callable[[], Any], seconds: float = CPU_SECONDS, memory: int = MEMORY_BYTES) -> Outcome:
    """Run an action in a process of its own that may take so many CPU seconds and bytes above what it starts with."""
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            _limit(seconds, memory)
            Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
            start = _pages()[1]
            told = f"{_told(action)}\n{int(peak_mib() * 2**20) - start}"
            with open(write, "w") as answer:
                answer.write(told)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as answer:
        said = answer.read()
    _, status, used = os.wait4(child, 0)
    cpu = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ended = number in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)
        return Outcome(False, HANG if ended else f"signal {number}", cpu, 0)
    if not said:
        return Outcome(False, MEMORY, cpu, 0)
    outcome, _, peak = said.rpartition("\n")
    if int(peak) > memory:
        return Outcome(False, MEMORY, cpu, int(peak))
    if cpu > seconds:
        return Outcome(False, HANG, cpu, int(peak))
    done, value = json.loads(outcome)
    return Outcome(done, value, cpu, int(peak))


def silent(action: Callable[[], Any]) -> Callable[[], Any]:
    """The action, for a process of its own, with what it prints thrown away."""

    def call() -> Any:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            return action()

    return call


def _limit(seconds: float, memory: int) -> None:
    most = _pages()[0] + _ADDRESSES * memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    last = int(cpu.ru_utime + cpu.ru_stime + seconds + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (last, last + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, _WAITING * seconds)


def _pages() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has."""
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def peak_mib() -> float:
    """The most resident memory that this process had (VmHWM) since it began or its peak was reset, in MiB."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def _told(action: Callable[[], Any]) -> str:
    try:
        return json.dumps([True, action()])
    except MemoryError:
        return json.dumps([False, MEMORY])
    except BaseException as error:
        return json.dumps([False, f"{type(error).__name__}: {ascii(str(error))[:300]}"])
