"""Running code in a process in which heavy packages cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FORBIDDEN = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "transformers", "optuna"):
            raise SystemExit(f"{name} was imported")
sys.meta_path.insert(0, Forbid())
"""


def without_torch(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code that may not import torch, numpy, transformers or optuna; an import ends it with exit status 1."""
    return subprocess.run([sys.executable, "-c", _FORBIDDEN + code], capture_output=True, text=True, cwd=cwd)
