"""What the tests of stock trainers share: a base that was stopped, and its wide twin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mupscale as mu
from benchmarks.trainer import Curve


@dataclass(frozen=True)
class Setting:
    """A base at step 20, its plan, its wide checkpoint, and the base's further curve."""

    folder: Path
    base: Path
    wide: Path
    plan: mu.Plan
    curve: Curve
