"""Where a result may be written: nothing is there yet, it is not in its base, and the folder above can be written to."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Fault, raise_faults
from ..files.strict import os_errors
from ..jobs.digests import check_outside
from ..storage.location import Location, Url
from ..storage.looking import names_in


def existing_above(path: Location) -> Path:
    """The nearest folder above a path that exists; those between are made when the result is written."""
    here = Path.cwd() / "x" if isinstance(path, Url) else path.absolute()
    return next(folder for folder in here.parents if folder.exists())


def check_free(out: Location, base: Location) -> None:
    """Raise unless `out` can be made: nothing of that name is there, and it does not lie in its base."""
    faults = []
    check_outside(base, out)
    if isinstance(out, Url):
        from ..storage.uploads import check_writable

        check_writable(out)
        with os_errors(out):
            faults = [
                Fault(
                    "job.output_not_empty", str(out), f"it holds {name}", "name another folder, or remove it"
                )
                for name in names_in(out)[:1]
            ]
        raise_faults("the result cannot be written there", faults)
        return
    above = existing_above(out)
    if not above.is_dir():
        faults.append(
            Fault(
                "directory.is_a_file",
                str(above),
                "a file, expected a folder",
                "name a directory somewhere else",
            )
        )
    elif not os.access(above, os.W_OK | os.X_OK):
        what = "this user may not write into it, or its disk is read-only"
        faults.append(Fault("directory.not_writable", str(above), what, "name a directory somewhere else"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        faults.append(
            Fault(
                "job.output_not_empty",
                str(out),
                "it exists already and is not empty",
                "name another directory, or remove it",
            )
        )
    raise_faults("the result cannot be written there", faults)
