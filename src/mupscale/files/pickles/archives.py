"""Archives of torch.save, looked through before torch reads them: what torch would load ends soon and is what was seen.

Knows: zip files and their pickle. Loads no tensor and runs nothing.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO

from ...errors import MupscaleError
from ..strict import printable
from .inert import survey

PICKLE = "data.pkl"
SAVE_AGAIN = "save it again with torch.save of a current torch"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_SPARE = 1 << 20  # bytes of a pickle besides what belongs to tensors
_EACH = 4096  # bytes for each tensor; names, shape and strides take a few hundred


def survey_archive(archive: zipfile.ZipFile, where: str) -> list[str]:
    """Raise if the archive is compressed or could be read in two ways, or if its pickle asks for more than its tensors explain.

    Returns the files of the tensors' bytes in the order in which the pickle names them.
    """
    names = [record.filename for record in archive.infolist()]
    if any(r.compress_type != zipfile.ZIP_STORED or r.flag_bits & 1 for r in archive.infolist()):
        raise MupscaleError(  # torch.save never compresses, and a few bytes could become very many
            f"{where} is compressed, so it cannot be read in place; {SAVE_AGAIN}",
            code="archive.is_compressed",
        )
    # torch looks names up without regard to case and takes the first; Python's zipfile takes the last.
    if len({name.lower() for name in names}) != len(names):
        raise MupscaleError(
            f"{where} is refused: it has two files of one name", code="archive.two_of_one_name"
        )
    if len({name.partition("/")[0] for name in names}) != 1:
        raise MupscaleError(
            f"{where} is refused: its files are not in one folder", code="archive.several_folders"
        )
    found = [r for r in archive.infolist() if r.filename.partition("/")[2].lower() == PICKLE]
    if not found:
        raise MupscaleError(f"{where} is refused: it has no {PICKLE}", code="archive.no_pickle")
    longest = _SPARE + _EACH * len(names)
    if found[0].file_size > longest:
        raise MupscaleError(
            f"{where} is refused: its pickle has {found[0].file_size} bytes, at most {longest} are expected",
            code="archive.pickle_too_long",
        )
    folder = names[0].partition("/")[0]
    return [f"{folder}/data/{key}" for key in survey(archive.read(found[0]), where, len(names))]


def data_start(file: IO[bytes] | io.RawIOBase, record: zipfile.ZipInfo) -> int:
    """Where the bytes of a file in an archive begin: behind its own header, which must be the one the directory means."""
    file.seek(record.header_offset)
    name_length: int
    extra_length: int
    signature, *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size) or b"")
    name, extra = file.read(name_length) or b"", file.read(extra_length) or b""
    at = 0
    while at + 4 <= len(extra):  # fields of an id, a size and so many bytes; torch pads with one of them
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    if signature != b"PK\x03\x04" or name != record.filename.encode() or at != extra_length:
        raise ValueError(f"the header of {printable(record.filename)} is damaged")
    return record.header_offset + _LOCAL_HEADER.size + name_length + extra_length
