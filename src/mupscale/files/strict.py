"""Strict parsing of untrusted files: JSON without surprises, names that stay in their folder, regular files only.

Knows: how to read text that may be broken or hostile, so that the only outcome other than a value is a
`MupscaleError`. Does not know what the text means.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import Fault, MupscaleError
from ..storage.location import Location, Url, without_secrets
from ..storage.pages import RemoteFile

LONGEST_TEXT = 100_000_000
"""The longest JSON read, in bytes: the limit safetensors itself sets for headers."""
_LONGEST_UNICODE = 25_000_000  # a text beyond ASCII takes four times its size in memory
MOST_OBJECTS = 300_000  # a header has one per tensor
_ITEMS_EACH = 14  # per object allowed
_DIGITS = 20  # as many as 2^64 has
T = TypeVar("T", str, int, float, bool, list[Any], dict[str, Any])
_MOST_FOLDERS = 3  # as many as a universal checkpoint of DeepSpeed has above its files
_SHOWN = 20  # faults of one error; a damaged file may have one per tensor


class Reason(NamedTuple):
    """Why something is refused, before it is known where it is: a code, and what was found."""

    code: str
    what: str


class _OddError(ValueError):
    """JSON that Python would take."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


def parse_json(raw: bytes, where: str, *, infinity: bool = False, objects: int = MOST_OBJECTS) -> Any:
    """Parse a JSON text; raises an error that says what is wrong with it.

    In addition to broken syntax it refuses duplicate keys, NaN (and infinity unless allowed), numbers beyond 20
    digits, deep nesting, and more items than any checkpoint has.

    >>> parse_json(b'{"a": [1, 2.5]}', "demo")
    {'a': [1, 2.5]}
    >>> try:
    ...     parse_json(b'{"a": 1, "a": 2}', "demo")
    ... except MupscaleError as error:
    ...     print(error.code)
    json.key_twice
    """
    if len(raw) > (LONGEST_TEXT if raw.isascii() else _LONGEST_UNICODE):
        raise MupscaleError(
            f"{where} is not valid: {len(raw)} bytes of JSON are too many", code="json.too_long"
        )
    found, items = raw.count(b"{"), raw.count(b",") + raw.count(b"[")
    if found > objects or items > _ITEMS_EACH * objects:
        raise MupscaleError(
            f"{where} is not valid: {found} objects and {items} items are too many",
            code="json.too_many_items",
        )

    def constant(text: str) -> float:
        if infinity and text != "NaN":
            return float(text)
        raise _OddError("json.not_finite", f"{text} is not a number of JSON")

    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except RecursionError:
        raise MupscaleError(
            f"{where} is not valid: it is nested too deeply", code="json.nested_too_deeply"
        ) from None
    except _OddError as error:
        raise MupscaleError(f"{where} is not valid: {_short(str(error))}", code=error.code) from None
    except ValueError as error:
        raise MupscaleError(f"{where} is not valid: {_short(str(error))}", code="json.not_json") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _OddError("json.key_twice", f"the key {double!r} appears twice")
    return found


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise _OddError("json.too_many_digits", f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise _OddError("json.beyond_every_float", f"{_short(text)} is beyond every float")
    return value


def _short(text: str) -> str:
    return ascii(text)[1:-1][:200]


def name_fault(name: Any) -> Reason | None:
    """Why a text cannot be the name of a file inside one folder, or None when it can.

    >>> name_fault("model.safetensors"), name_fault("../x").code
    (None, 'file.name_with_folders')
    """
    fault = text_fault(name)
    if fault is not None:
        return fault
    if "/" in name or "\\" in name or name in (".", ".."):
        return Reason("file.name_with_folders", "a file name without folders is expected")
    if len(name.encode()) > 200:
        return Reason("file.name_too_long", "the name is longer than 200 bytes")
    return None


def path_fault(name: Any) -> Reason | None:
    """Why a text cannot be the name of a file inside a folder or up to three folders below it, or None when it can.

    >>> path_fault("1_Pooling/config.json"), path_fault("../config.json").code
    (None, 'file.name_with_folders')
    """
    if not isinstance(name, str) or name.count("/") > _MOST_FOLDERS:
        return name_fault(name)
    return next((fault for part in name.split("/") if (fault := name_fault(part)) is not None), None)


def text_fault(text: Any) -> Reason | None:
    """Why a value cannot be the name of a tensor, or None when it can."""
    if not isinstance(text, str) or not text:
        return Reason("file.name_not_text", "a name is a text that is not empty")
    if len(text) > 4096:
        return Reason("file.name_too_long", f"the name has {len(text)} characters")
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in text):
        return Reason("file.name_has_control_characters", "the name has control characters")
    return None


def printable(name: object) -> str:
    """Untrusted text for a message, made printable and short."""
    text = without_secrets(name if isinstance(name, str) else repr(name))
    return _short(text)[:120]


def raise_few(claim: str, faults: Iterable[Fault]) -> None:
    """Raise one error with the first faults and the number of the others; return if there are none."""
    collected = list(faults)
    if len(collected) > _SHOWN:
        more = len(collected) - _SHOWN
        collected = [*collected[:_SHOWN], Fault("more", "…", f"and {more} more")]
    if collected:
        raise MupscaleError(claim, collected)


@contextmanager
def refuse_malformed(claim: str, code: str = "json.malformed_record") -> Iterator[None]:
    """Turn the exceptions of reading malformed plain values into one `MupscaleError`.

    >>> try:
    ...     with refuse_malformed("this is not a plan", "plan.malformed_record"):
    ...         {}["seed"]
    ... except MupscaleError as error:
    ...     print(error.code)
    plan.malformed_record
    """
    try:
        yield
    except MupscaleError:
        raise  # some are a ValueError too
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise MupscaleError(f"{claim}; {type(error).__name__}: {printable(str(error))}", code=code) from None


@contextmanager
def os_errors(where: Location | str) -> Iterator[None]:
    """Turn errors of the operating system about a file, and paths that cannot be one, into a `MupscaleError`."""
    try:
        with system_errors(where):
            yield
    except MupscaleError:
        raise  # some are a ValueError too
    except ValueError as error:  # a NUL in a path
        raise MupscaleError(
            f"{printable(str(where))} cannot be used: {error}", code="file.not_a_path"
        ) from None


@contextmanager
def system_errors(where: Location | str = "") -> Iterator[None]:
    """Turn errors of the operating system into a `MupscaleError` about `where`, or else about the file that they name.

    Without `where` it stands around a public function, as a decorator: whatever call the system refuses, a disk that fails
    while another failure is handled included, has a code.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads what is printed has gone: no file is concerned
    except OSError as error:
        raise MupscaleError(
            f"{printable(str(where or error.filename or 'a file'))} cannot be used: "
            f"{without_secrets(str(error.strerror or error))}",
            code=_os_code(error),
        ) from None


def _os_code(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "file.does_not_exist"
    return "file.no_permission" if isinstance(error, PermissionError) else "file.cannot_be_used"


def open_regular(path: Path) -> int:
    """Open a regular file for reading; pipes and devices, which could block forever, are refused."""
    with os_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MupscaleError(f"{printable(str(path))} is not a regular file", code="file.not_regular")
    return descriptor


def read_regular(path: Location, longest: int = LONGEST_TEXT) -> bytes:
    """Read a regular file of at most `longest` bytes."""
    if isinstance(path, Url):
        return _read_remote(path, longest)
    descriptor = open_regular(path)
    with os_errors(path), open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > longest:
            raise _too_long(path, size, longest)
        raw = file.read(size)  # reading up to a limit would take memory for the limit
    if len(raw) < size:
        raise shorter(path, len(raw), size)
    return raw


def _read_remote(url: Url, longest: int) -> bytes:
    with os_errors(url):
        file = RemoteFile(url)
        if file.size > longest:
            raise _too_long(url, file.size, longest)
        return file.read(0, file.size)


def shorter(where: Location, found: int, expected: int) -> MupscaleError:
    """The refusal of a file that ends before the size that it had when it was opened."""
    return MupscaleError(
        f"{printable(str(where))} ends at byte {found}, expected {expected}: it changed while it was read",
        code="file.changed_while_read",
    )


def _too_long(where: Location, size: int, longest: int) -> MupscaleError:
    return MupscaleError(
        f"{printable(str(where))} has {size} bytes, at most {longest} are expected", code="file.too_long"
    )
