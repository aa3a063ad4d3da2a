"""`write_report`: one page about one or several studies, done or still running. Reads, draws, writes files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import MupscaleError
from ...extras import needs
from ..whole import write_whole
from .bars import bars_of
from .known import Known, know
from .verdict import Verdict, beside, verdicts


def write_report(
    *folders: str | Path,
    out: str | Path | None = None,
    storage: Any = None,
    study: str | Sequence[str] = "mupscale",
) -> Path:
    """Write the page about studies: index.html and its pictures. Needs the extra `plot`.

    Args:
        *folders: Where `tune` kept the studies.
        out: The folder to write to. By default `report` in the folder, or in this directory when there are several.
        storage: The storage that `tune` was given.
        study: The name that `tune` was given: one for all folders, or one for each.

    Returns:
        The path of the page.

    Raises:
        MupscaleError: If a folder has no study, or there are other numbers of folders and names.

    >>> try:
    ...     write_report("nowhere")
    ... except MupscaleError as error:
    ...     print(error.code)
    study.no_journal
    """
    return write_judged_report(folders, out, storage, study)[0]


def write_judged_report(
    folders: Sequence[str | Path], out: str | Path | None, storage: Any, study: str | Sequence[str]
) -> tuple[Path, list[Verdict]]:
    """Write the page and its pictures; the page's path, and the verdicts with which it begins."""
    names = [study] * len(folders) if isinstance(study, str) else list(study)
    if not folders or len(names) not in (1, len(folders)):
        raise MupscaleError(
            f"a report of {len(folders)} folders and {len(names)} study names: expected one folder or more, and one name for "
            "all or one for each",
            code="report.names_unlike_folders",
        )
    names = names * len(folders) if len(names) == 1 else names
    place = (
        Path(out) if out is not None else Path("report") if len(folders) > 1 else Path(folders[0]) / "report"
    )
    if place.exists() and not place.is_dir():
        raise MupscaleError(
            f"{place} is a file, expected a folder for the page; name another one (--out DIR)",
            code="directory.is_a_file",
        )
    studies = [know(folder, storage, name) for folder, name in zip(folders, names, strict=True)]
    with needs("a report", "plot"):
        from .page import page_of
    judged = verdicts_of(studies, storage)
    page, images = page_of(studies, [bars_of(known) for known in studies], judged)
    for name, data in {**images, "index.html": page.encode()}.items():
        write_whole(place / name, data)
    return place / "index.html", judged


def verdicts_of(studies: Sequence[Known], storage: Any = None) -> list[Verdict]:
    """The verdicts on these studies; for one that is stored in its folder, seeds next to it are read too."""
    here = storage is None
    return verdicts(beside(studies[0]) if here and len(studies) == 1 else studies, here)
