"""Libraries of native code that tests load: compiled where no earlier process has done so, kept in torch's folder for extensions.

Two processes that make one at once both do, each under a name of its own; the last to be renamed stays.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_COMPILER = "g++"


class NotBuiltError(Exception):
    """The library cannot be compiled here: no compiler, or one that refuses the source."""


def library(source: Path, of: Sequence[str], flags: Sequence[str], linked: Sequence[str] = ()) -> Path:
    """The library of one source; `of` are the words beside the source that decide what is in it."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    asked = "\0".join(of).encode() + source.read_bytes()
    made = Path(root) / f"mupscale_{source.stem}" / f"{hashlib.sha256(asked).hexdigest()[:16]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        own = made.with_suffix(f".{os.getpid()}")
        try:
            _compile(source, own, flags, linked)
            own.replace(made)
        finally:
            own.unlink(missing_ok=True)
    return made


def _compile(source: Path, output: Path, flags: Sequence[str], linked: Sequence[str]) -> None:
    compiler = shutil.which(os.environ.get("CXX") or _COMPILER)
    if compiler is None:
        raise NotBuiltError(f"no compiler: {os.environ.get('CXX') or _COMPILER} is not on the path")
    done = subprocess.run(
        [compiler, *flags, str(source), "-o", str(output), *linked],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NotBuiltError(f"{compiler} does not compile {source.name}: {done.stderr[:2000]}")
