"""`--json FILE` of every verb: what was found, or the codes of a refusal, for programs.

A verb sets `chosen.found`; `main` adds the exit status. Imports no torch.
"""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import MupscaleError


def check_json(chosen: argparse.Namespace) -> None:
    """Raise unless the file can be written."""
    file = chosen.json
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        chosen.json = None  # there is no place for the refusal either
        raise MupscaleError(
            f"--json {file}: expected the name of a file in a folder that exists",
            code="option.not_a_file_name",
        )


def write_json(chosen: argparse.Namespace, status: int, error: MupscaleError | None = None) -> None:
    """Write what a verb found, with its exit status; nothing where no file is named, or the verb has written it itself."""
    found: dict[str, Any] | None = getattr(chosen, "found", None)
    if error is not None:
        faults = [fault._asdict() for fault in error.faults]
        found = {"refused": {"claim": error.claim, "codes": list(error.codes), "faults": faults}}
    if chosen.json is None or found is None:
        return
    import json  # only where it is asked for

    text = json.dumps({"verb": chosen.verb, "status": status, **found}, indent=1, default=_plain)
    chosen.json.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> float | str:
    """Fractions and what numpy counts as numbers, all else as text."""
    return float(value) if hasattr(value, "__float__") else str(value)
