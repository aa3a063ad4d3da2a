"""Archives of torch.save, looked through before torch reads them: what torch would load ends soon and is what was seen.

Knows: zip files and their pickle. Loads no tensor and runs nothing.
"""

from __future__ import annotations

import zipfile

from ..errors import MupscaleError
from .inert import survey

PICKLE = "data.pkl"
_SPARE = 1 << 20  # bytes of a pickle beside what belongs to tensors
_EACH = 4096  # bytes for each tensor; names, shape and strides take a few hundred


def survey_archive(archive: zipfile.ZipFile, where: str) -> None:
    """Raise if the archive could be read in two ways, or if its pickle asks for more than its tensors explain."""
    names = [record.filename for record in archive.infolist()]
    # torch looks names up without regard to case and takes the first; Python's zipfile takes the last.
    if len({name.lower() for name in names}) != len(names):
        raise MupscaleError(f"{where} is refused: it has two files of one name")
    if len({name.partition("/")[0] for name in names}) != 1:
        raise MupscaleError(f"{where} is refused: its files are not in one folder")
    found = [r for r in archive.infolist() if r.filename.partition("/")[2].lower() == PICKLE]
    if not found:
        raise MupscaleError(f"{where} is refused: it has no {PICKLE}")
    longest = _SPARE + _EACH * len(names)
    if found[0].file_size > longest:
        raise MupscaleError(
            f"{where} is refused: its pickle has {found[0].file_size} bytes, at most {longest} are expected"
        )
    survey(archive.read(found[0]), where, len(names))
