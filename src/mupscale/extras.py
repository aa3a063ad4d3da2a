"""The optional extras: their packages and what they enable, and the error that names a missing one.

A test compares the table with the package's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from .errors import MupscaleError


class Extra(NamedTuple):
    """Package names, the same for import and installation, and what they enable."""

    packages: tuple[str, ...]
    enables: str


EXTRAS: Mapping[str, Extra] = {
    "fast": Extra(("numba",), "noise from a compiled loop: the same bits, several times faster"),
    "hf": Extra(
        ("transformers", "accelerate"), "Hugging Face checkpoints: plan, grow, upscale, check; the Trainer"
    ),
    "lightning": Extra(("lightning",), "LightningCallback: Lightning continues from a widened checkpoint"),
    "plot": Extra(("matplotlib",), "figures of the demo, coordinate checks and reports"),
    "remote": Extra(("fsspec", "s3fs"), "a base or a result at a URL: s3://bucket/model and others"),
    "tune": Extra(("optuna", "psycopg", "sqlalchemy"), "mupscale tune, mupscale report"),
}


@contextmanager
def needs(what: str, *extras: str) -> Iterator[None]:
    """Turn the import error of an extra's package into one line that says what to install.

    An import error of any other package is not changed.

    >>> try:
    ...     with needs("tuning", "tune"):
    ...         raise ModuleNotFoundError("No module named 'optuna'", name="optuna.trial")
    ... except MupscaleError as error:
    ...     print(error.code)
    extra.missing
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if not any(package in EXTRAS[extra].packages for extra in extras):
            raise
        remedy = f"'mupscale[{','.join(extras)}]'"
        if isinstance(error, ModuleNotFoundError):
            raise MupscaleError(
                f"{what} needs {package}: pip install {remedy}", code="extra.missing"
            ) from None
        raise MupscaleError(
            f"{what} needs {package}, which is installed but cannot be imported ({error}): pip install --upgrade {remedy}",
            code="extra.broken",
        ) from error
