"""What each extra brings and what it is good for, as data, and the line that names the one that is missing.

A test holds the table against the package's own metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import MupscaleError


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


@contextmanager
def needs(what: str, *extras: str) -> Iterator[None]:
    """Turn the lack of an extra's package, or one that does not import, into one line that says what to install.

    A package that belongs to none of the extras is somebody else's matter, and its error stays what it was.

    >>> try:
    ...     with needs("tuning", "tune"):
    ...         raise ModuleNotFoundError("No module named 'optuna'", name="optuna.trial")
    ... except MupscaleError as error:
    ...     print(error)
    tuning needs optuna: pip install 'mupscale[tune]'
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if not any(package in EXTRAS[extra].packages for extra in extras):
            raise
        remedy = f"'mupscale[{','.join(extras)}]'"
        if isinstance(error, ModuleNotFoundError):
            raise MupscaleError(f"{what} needs {package}: pip install {remedy}") from None
        raise MupscaleError(
            f"{what} needs {package}, which is there and does not import ({error}): pip install --upgrade {remedy}"
        ) from error
