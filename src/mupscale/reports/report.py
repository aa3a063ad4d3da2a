"""`mu.diagnostics.report`: one page about one or several studies, done or still running. Reads, draws, writes files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MupscaleError
from ..extras import needs
from .bars import bars_of
from .known import know


def report(
    *folders: str | Path,
    out: str | Path | None = None,
    storage: Any = None,
    study: str | Sequence[str] = "mupscale",
) -> Path:
    """Write index.html and its pictures; the page's path.

    A folder is where `tune` kept a study; `storage` and `study` are those that it was given, one name for all folders
    or one for each. `out` is by default `report` in the folder, or in this directory when there are several.

    >>> report("nowhere")
    Traceback (most recent call last):
    mupscale.errors.MupscaleError: nowhere/study.journal: no such file; name the folder of a study, or its storage (--storage)
    """
    names = [study] * len(folders) if isinstance(study, str) else list(study)
    if not folders or len(names) not in (1, len(folders)):
        raise MupscaleError(
            f"a report of {len(folders)} folders and {len(names)} study names: expected one folder or more, and one name for "
            "all or one for each"
        )
    names = names * len(folders) if len(names) == 1 else names
    place = (
        Path(out) if out is not None else Path("report") if len(folders) > 1 else Path(folders[0]) / "report"
    )
    if place.exists() and not place.is_dir():
        raise MupscaleError(
            f"{place} is a file, expected a folder for the page; name another one (--out DIR)"
        )
    studies = [know(folder, storage, name) for folder, name in zip(folders, names, strict=True)]
    with needs("a report", "plot"):
        from .page import page_of
    page, images = page_of(studies, [bars_of(known) for known in studies])
    place.mkdir(parents=True, exist_ok=True)
    for name, data in {**images, "index.html": page.encode()}.items():
        _write(place / name, data)
    return place / "index.html"


def _write(path: Path, data: bytes) -> None:
    """Write atomically: several workers may finish at once, and a reader must see a whole page."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
