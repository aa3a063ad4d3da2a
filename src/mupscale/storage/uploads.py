"""Writing to S3: small objects at once, large ones in parts that become an object when all of them are there.

Parts belong to an upload, which only its id finds; no reader of the store sees them before the upload is completed. Every call
may be repeated. Knows the requests. Does not know what is written.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
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
_TRIES = 3  # of a part that reaches the store changed
_SAID = {
    "create_multipart_upload": "UploadId", "upload_part": "ETag", "put_object": "ETag", "complete_multipart_upload": "ETag",
    "list_parts": "UploadId", "list_multipart_uploads": "Bucket", "head_object": "ETag",
}  # fmt: skip
"""Request -> what every answer to it has; a page of HTML with the status 200 is taken for no answer."""


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


def send(url: Url, upload: str, number: int, raw: bytes | bytearray, *, md5: bool = False) -> str:
    """Send a part, numbered from 1; returns what the store calls it.

    The store may refuse one that was damaged on its way. With `md5`, where it calls parts by the MD5 of their bytes, that is
    compared with what was sent, and a part that is called otherwise is sent again.
    """
    digest = hashlib.md5(raw, usedforsecurity=False)
    fields = {"PartNumber": number, "ContentMD5": base64.b64encode(digest.digest()).decode()}
    for _ in range(_TRIES):
        answer = _call(url, "upload_part", UploadId=upload, Body=bytes(raw), **fields)
        name = str(answer["ETag"]).strip('"')
        if not md5 or name == digest.hexdigest():
            return name
    raise MupscaleError(
        f"{url}: part {number} reached the store changed, {_TRIES} times; look at what lies between here and the store, and "
        "run the same command again",
        code="store.part_damaged",
    )


def probe(folder: Url) -> bool:
    """Whether a store calls parts by the MD5 of their bytes; one that cannot list parts is refused.

    A part of one byte is sent to an upload that is given up again, before anything of a result is.
    """
    url, raw = folder / f"probe-{secrets.token_hex(4)}", b"?"
    upload = begin(url, "probe")
    try:
        name = send(url, upload, 1, raw)
        try:
            found, _ = sent(url, upload), uploads_in(folder)
        except (PermissionError, FileNotFoundError) as error:
            found, why = {}, str(error)
        else:
            why = f"it lists {found}"
        if found not in (
            None,
            {1: (name, len(raw))},
        ):  # given up by a worker that has just published the result
            raise MupscaleError(
                f"{folder}: the store does not list the parts of an upload ({why}), so an upload that is interrupted could "
                "not be resumed; write to a folder of this machine and copy the result",
                code="store.cannot_list_parts",
            )
    finally:
        abort(url, upload)
    return name == hashlib.md5(raw, usedforsecurity=False).hexdigest()


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
    listed = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
    with suppress(FileNotFoundError):  # completed by another process, or by a request whose answer was lost
        _call(url, "complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": listed})


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
    wanted, found = {"Bucket": bucket, "Prefix": f"{prefix}/"}, list[tuple[Url, str]]()
    while True:
        answer = request(folder, _s3, "list_multipart_uploads", wanted)
        for upload in answer.get("Uploads", ()):
            found.append((Url(folder.scheme, f"{bucket}/{upload['Key']}"), str(upload["UploadId"])))
        if not answer.get("IsTruncated"):
            return found
        wanted |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _call(url: Url, method: str, **options: Any) -> Any:
    bucket, _, key = url.path.partition("/")
    try:
        return request(url, _s3, method, {"Bucket": bucket, "Key": key, **options})
    except OSError as error:
        if code_of(error) in ("NoSuchUpload", "404", "NoSuchKey"):
            raise FileNotFoundError(str(url)) from None
        raise


async def _s3(system: Any, method: str, options: dict[str, Any]) -> Any:
    answer = await system._call_s3(method, **options)
    if _SAID.get(method, "ResponseMetadata") not in answer:
        raise OSError(f"an answer to {method} that no S3 store gives, such as a page of a proxy")
    return answer
