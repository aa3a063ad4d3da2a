"""What each extra brings and what it is good for, as data. A test holds it against the package's own metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Extra:
    """Packages by the names under which they are imported and installed, and what works with them."""

    packages: tuple[str, ...]
    enables: str


EXTRAS: Mapping[str, Extra] = {
    "fast": Extra(("numba",), "noise from a compiled loop, the same bits several times faster"),
    "hf": Extra(
        ("transformers", "accelerate"), "Hugging Face checkpoints: plan, widen, upscale, check; the Trainer"
    ),
    "lightning": Extra(("lightning",), "LightningCallback: Lightning goes on from a widened checkpoint"),
    "plot": Extra(("matplotlib",), "figures: of the demo, of coordinate checks, of reports"),
    "tune": Extra(("optuna", "psycopg", "sqlalchemy"), "mupscale tune, mupscale report"),
}
