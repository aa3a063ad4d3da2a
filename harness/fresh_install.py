"""An empty environment with the wheel in it: the tree that git tracks, what is built of it, and a shell that sees nothing else.

Needs the standard library alone, besides `build` and `hatchling` for the wheel. Does not depend on where the tree lies: a
clone of any depth, a worktree and an unpacked archive give the same wheel.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
LEFT_BEHIND = (
    "PYTHON", "VIRTUAL_ENV", "MUPSCALE", "GIT_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC",
)  # fmt: skip
"""How the names of variables begin that must not reach a new user: they lead back to this tree or to another job."""
NOT_TRACKED = (
    "__pycache__", "*.pyc", "*.egg-info", "site", "dist", "build", ".git", ".ci", ".*cache", ".venv", "venv", ".hypothesis",
)  # fmt: skip
"""What a copy leaves out where git cannot say what it tracks."""
TAIL, WHOLE = 6, 60
"""Lines that are shown of what a command says, and of one that failed."""


def requirements(project: dict[str, object], newest: bool) -> list[str]:
    """Every requirement of the package and its extras, at its lower bound or without one."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    every = [*_texts(project["dependencies"]), *(text for extra in extras.values() for text in extra)]
    packages = [text for text in every if not text.startswith("mupscale[")]
    return [text.partition(">=")[0] if newest else text.replace(">=", "==") for text in packages]


def _texts(found: object) -> list[str]:
    assert isinstance(found, list)
    return found


def cpu_seconds() -> float:
    """Processor seconds of every child that has ended, and of its children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass
class Shell:
    """A shell in an environment of its own, and what each kind of command took: by the clock, and of the processor."""

    room: Path
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def run(
        self, what: str, command: Sequence[str | Path], folder: str = "."
    ) -> subprocess.CompletedProcess[str]:
        """Run a command without anything of this environment but the way to the registry."""
        print(f"$ {shlex.join(map(str, command))}", flush=True)
        began, used = time.monotonic(), cpu_seconds()
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.room / folder,
            env=self.environment(),
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began
        self.cpu[what] = self.cpu.get(what, 0.0) + cpu_seconds() - used
        for line in (done.stdout + done.stderr).splitlines()[-(WHOLE if done.returncode else TAIL) :]:
            print(f"  {line}", flush=True)
        return done

    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_BEHIND)}
        clean["PATH"] = f"{self.room / 'venv' / 'bin'}{os.pathsep}{clean.get('PATH', '')}"
        clean |= {"HF_HOME": str(self.room / "hub"), "HF_HUB_OFFLINE": "1"}  # nothing comes from a hub
        return clean | self.variables


def tracked(root: Path) -> list[str]:
    """The files that git tracks below a folder, as they are now; none where git cannot say."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, env=environment)
    except OSError:
        return []
    names = os.fsdecode(done.stdout).split("\0") if done.returncode == 0 else []
    return [name for name in names if name and (root / name).is_file()]


def exported(root: Path, to: Path) -> Path:
    """A copy of a tree as a clean clone has it: what git tracks, or everything that is not made by tools."""
    names = tracked(root)
    if "pyproject.toml" not in names:
        shutil.copytree(root, to, ignore=shutil.ignore_patterns(*NOT_TRACKED), symlinks=True)
        return to
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name, follow_symlinks=False)
    return to


def wheel_in(folder: Path) -> Path:
    """The wheel, built from the sdist as a registry's users would build it, and the sdist from a clean copy of the tree."""
    tree = exported(ROOT, folder.parent / "tree")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=""))
    if done.returncode:
        raise SystemExit(f"{shlex.join(build)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return next(folder.glob("*.whl"))


def installed(line: str, wheel: Path) -> list[str]:
    """The page's line, with the wheel in place of the name.

    >>> installed('pip install "mupscale[tune]"', Path("/x/m.whl"))
    ['pip', 'install', '/x/m.whl[tune]']
    """
    return [re.sub(r"^mupscale(?=\[|$)", str(wheel), word) for word in shlex.split(line)]


def with_torch(shell: Shell) -> bool:
    """Make an empty environment and install torch; whether there was a registry that has it."""
    subprocess.run([sys.executable, "-m", "venv", shell.room / "venv"], check=True)
    if shell.run("torch", ["pip", "install", "--quiet", TORCH]).returncode:
        print(f"needs a package registry that has {TORCH}")
        return False
    return True
