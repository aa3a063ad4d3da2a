"""Writing to S3: small objects at once, large ones in parts that become an object when all of them are there.

Parts belong to an upload, which only its id finds; no reader of the store sees them before the upload is completed. Every call
may be repeated. Knows the requests. Does not know what is written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import MupscaleError
from .location import Url
from .remote import code_of, request

SMALLEST_PART = 5 << 20
"""Bytes that S3 asks of every part but the last."""
MOST_PARTS = 10_000
_MARK = "mupscale-job"


def check_writable(url: Url) -> None:
    """Raise unless results can be written to a store of this kind."""
    if url.scheme not in ("s3", "s3a"):
        raise MupscaleError(
            f"{url}: a result is written to a folder of this machine or to s3://, and to no other store",
            code="store.cannot_be_written",
        )


def put(url: Url, raw: bytes, *, only_new: bool = False) -> None:
    """Write an object; with `only_new`, one that is there stays as it is."""
    with suppress(FileExistsError):
        _call(url, "put_object", Body=raw, **({"IfNoneMatch": "*"} if only_new else {}))


def remove(url: Url) -> None:
    _call(url, "delete_object")


def begin(url: Url, mark: str) -> str:
    """Begin an upload that will become this object, which then carries a mark; returns its id."""
    return str(_call(url, "create_multipart_upload", Metadata={_MARK: mark})["UploadId"])


def send(url: Url, upload: str, number: int, raw: bytes | bytearray) -> str:
    """Send a part, numbered from 1; returns what the store calls it. The store refuses one that was damaged on its way."""
    digest = base64.b64encode(hashlib.md5(raw, usedforsecurity=False).digest()).decode()
    answer = _call(url, "upload_part", UploadId=upload, PartNumber=number, Body=bytes(raw), ContentMD5=digest)
    return str(answer["ETag"]).strip('"')


def sent(url: Url, upload: str) -> dict[int, tuple[str, int]] | None:
    """The parts that the store has, each with its name and size; None if there is no such upload (any more)."""
    found: dict[int, tuple[str, int]] = {}
    after = 0
    while True:
        try:
            answer = _call(url, "list_parts", UploadId=upload, PartNumberMarker=after)
        except FileNotFoundError:
            return None
        for part in answer.get("Parts", ()):
            found[int(part["PartNumber"])] = (str(part["ETag"]).strip('"'), int(part["Size"]))
        if not answer.get("IsTruncated"):
            return found
        after = int(answer["NextPartNumberMarker"])


def complete(url: Url, upload: str, parts: Mapping[int, str]) -> None:
    """Make an object of all parts: from now on readers see it. Nothing happens if that is done already."""
    told = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
    with suppress(FileNotFoundError):  # completed by another process, or by a request whose answer was lost
        _call(url, "complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": told})


def abort(url: Url, upload: str) -> None:
    """Give an upload up, with all its parts."""
    with suppress(FileNotFoundError):
        _call(url, "abort_multipart_upload", UploadId=upload)


def mark_of(url: Url) -> tuple[str, int] | None:
    """The mark that an object carries, and its size; None if there is no such object."""
    try:
        answer = _call(url, "head_object")
    except FileNotFoundError:
        return None
    return str(answer.get("Metadata", {}).get(_MARK, "")), int(answer["ContentLength"])


def uploads_in(folder: Url) -> list[tuple[Url, str]]:
    """Every upload that is under way below a folder."""
    bucket, _, prefix = folder.path.partition("/")
    answer = request(folder, _s3, "list_multipart_uploads", {"Bucket": bucket, "Prefix": f"{prefix}/"})
    return [
        (Url(folder.scheme, f"{bucket}/{told['Key']}"), str(told["UploadId"]))
        for told in answer.get("Uploads", ())
    ]


def _call(url: Url, method: str, **options: Any) -> Any:
    bucket, _, key = url.path.partition("/")
    try:
        return request(url, _s3, method, {"Bucket": bucket, "Key": key, **options})
    except OSError as error:
        if code_of(error) in ("NoSuchUpload", "404", "NoSuchKey"):
            raise FileNotFoundError(str(url)) from None
        raise


async def _s3(system: Any, method: str, options: dict[str, Any]) -> Any:
    return await system._call_s3(method, **options)
