"""Requests to a store: listing, size and version of an object, a range of its bytes; each is tried a few times.

A request that is not answered in time counts as failed. What is refused for good (no such object, forbidden) is an
`OSError` of the operating system's kind at once; what keeps failing is an error that names the last reason. Knows
fsspec. Does not know what the bytes mean.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import uniform
from threading import Lock
from time import sleep
from typing import Any

from ..errors import MupscaleError
from ..extras import needs
from .location import Url, location, without_secrets

PAUSES = (0.2, 1.0, 3.0, 8.0, 15.0)
"""Seconds between tries; a store that throttles or restarts answers again within half a minute."""
TIMEOUT = "MUPSCALE_STORAGE_TIMEOUT"
"""The variable with the seconds that a request may take."""
_SECONDS = 60.0  # for at most 8 MiB, so that a line of 140 kB/s is still fast enough
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
_FINAL_CODES = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
_MISTAKES = (TypeError, ValueError, AttributeError, NotImplementedError, ImportError)
_VERSIONS = (
    "ETag", "etag", "generation", "blob_id", "sha", "version_id", "md5", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip
"""What stores call that which changes whenever an object does, the surest first."""
_known: dict[tuple[str, str, int], Any] = {}
_lock = Lock()


@dataclass(frozen=True, slots=True)
class Entry:
    """An object or a folder of a store."""

    name: str
    is_file: bool
    size: int
    version: str
    """A text that changes whenever the object does; empty where the store has none."""


def entry(url: Url) -> Entry | None:
    """What a URL names; None if there is nothing."""
    try:
        return _entry(request(url, _s3_info if url.scheme in ("s3", "s3a") else "info", _path(url)))
    except FileNotFoundError:
        return None


def listing(url: Url) -> list[Entry]:
    """What lies directly in a folder, sorted by name; nothing if there is no such folder."""
    try:
        found = request(url, "ls", _path(url), detail=True)
    except FileNotFoundError:
        return []
    here = _path(url)
    return sorted(
        (_entry(info) for info in found if info["name"].rstrip("/") != here), key=lambda one: one.name
    )


def fetch(url: Url, version: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of an object; one that has another version by now is refused where the store can tell."""
    if url.scheme in ("s3", "s3a"):
        bucket, _, key = _path(url).partition("/")
        wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        guard = {"IfMatch": version} if version else {}
        try:
            raw = request(url, _s3_body, {**wanted, **guard})
        except FileExistsError:
            raise MupscaleError(
                f"{url} changed while it was read; wait until it is written, and run again",
                code="file.changed_while_read",
            ) from None
    elif filesystem(url).async_impl:
        raw = request(url, "cat_file", _path(url), start=start, end=end)
    else:  # buffered files would read more than they are asked for
        raw = request(url, "cat_file", _path(url), start=start, end=end, cache_type="none")
    return bytes(raw)


def request(url: Url, method: str | Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of the file system of a URL, or an async function of it, until it is answered."""
    system = filesystem(url)
    for pause in (*PAUSES, None):
        try:
            return _once(system, method, *arguments, **options)
        except _MISTAKES:
            raise
        except Exception as error:
            _raise_final(url, error)
            if pause is None:
                raise MupscaleError(
                    f"{url}: the store does not answer, {len(PAUSES) + 1} tries, the last ended with: {_reason(error)}; "
                    "run the same command again when it does",
                    code="store.does_not_answer",
                ) from None
        sleep(uniform(pause / 2, pause))  # many ranks that failed together come back one after the other
    raise AssertionError


def timeout() -> float:
    """The seconds that a request may take."""
    given = os.environ.get(TIMEOUT, "")
    try:
        return float(given) if given else _SECONDS
    except ValueError:
        raise MupscaleError(
            f"{TIMEOUT}={given!r}: expected seconds, such as {_SECONDS:g}", code="store.timeout_not_seconds"
        ) from None


def filesystem(url: Url) -> Any:
    """fsspec's file system of a URL, one for each process; what is listed is never remembered."""
    with needs(f"{url.scheme}://", "remote"):
        import fsspec  # type: ignore[import-untyped]
    host = url.path.partition("/")[0]
    key = (url.scheme, f"{url.user}@{host}", os.getpid())
    with _lock:
        if key not in _known:
            _known[key] = _made(fsspec, url)
        return _known[key]


def _made(fsspec: Any, url: Url) -> Any:
    if url.scheme in ("s3", "s3a", "gs", "hf") and (url.user or url.query):
        raise MupscaleError(
            f"{url} was given with a password or a query, which no {url.scheme}:// address has; leave it out, and set "
            "the credentials as the store's own tools read them",
            code="store.password_in_address",
        )
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.scheme in ("s3", "s3a"):
        with needs(f"{url.scheme}://", "remote"):
            import s3fs  # type: ignore[import-untyped] # noqa: F401
        # One try each: tries that are nested multiply, and a store that is down would be asked for an hour.
        configured = fsspec.config.conf.get(url.scheme, {}).get("config_kwargs", {})
        limits = {
            "connect_timeout": timeout(),
            "read_timeout": timeout(),
            "retries": {"total_max_attempts": 1},
        }
        options["config_kwargs"] = {**limits, **configured}
    try:
        system, _ = fsspec.core.url_to_fs(url.full, **options)
    except ImportError as error:
        raise MupscaleError(
            f"{url}: {without_secrets(str(error))}", code="extra.store_package_missing"
        ) from None
    except ValueError as error:
        raise MupscaleError(
            f"{url}: {without_secrets(str(error))}; known to fsspec are s3, gs, hf, https and others",
            code="store.unknown_scheme",
        ) from None
    if hasattr(system, "retries"):
        system.retries = 1
    return system


def _once(system: Any, method: str | Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not system.async_impl:
        return getattr(system, str(method))(*arguments, **options)
    from fsspec.asyn import sync  # type: ignore[import-untyped]

    called = partial(method, system) if callable(method) else getattr(system, f"_{method}")
    return sync(system.loop, called, *arguments, timeout=timeout(), **options)


async def _s3_info(system: Any, path: str) -> dict[str, Any]:
    info: dict[str, Any] = await system._info(path)
    if info["type"] == "file" and not info.get("ETag"):
        raise OSError("an answer that no S3 store gives, such as a page of a proxy")
    return info


async def _s3_body(system: Any, wanted: dict[str, Any]) -> bytes:
    answer = await system._call_s3("get_object", **wanted)
    async with answer["Body"] as body:  # gives the connection back, also one that broke
        raw: bytes = await body.read()
    return raw


def _path(url: Url) -> str:
    path: str = filesystem(url)._strip_protocol(url.full)
    return path


def _entry(info: dict[str, Any]) -> Entry:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
    name = str(location(str(info["name"]))).rstrip("/").rpartition("/")[2]
    return Entry(name, info["type"] == "file", int(info.get("size") or 0), version)


def code_of(error: BaseException) -> str:
    """The word by which S3 names an error; empty for errors of another kind."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))


def _raise_final(url: Url, error: Exception) -> None:
    """Raise what no further try can change."""
    code = code_of(error)
    if code in ("PreconditionFailed", "412"):
        raise FileExistsError(errno.EEXIST, "another version is there", str(url)) from None
    if code == "NoSuchBucket":
        bucket = url.path.partition("/")[0]
        raise MupscaleError(
            f"{url}: the store has no bucket {bucket!r}; check its name and the endpoint",
            code="store.no_such_bucket",
        ) from None
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        raise MupscaleError(
            f"{url}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", code="store.no_credentials"
        ) from None
    if type(error).__name__ == "ParamValidationError":
        raise MupscaleError(
            f"{url}: {' '.join(without_secrets(str(error)).split())[:200]}", code="store.invalid_request"
        ) from None
    if isinstance(error, PermissionError):
        what = f"the store forbids it ({code or 'access denied'})"
        raise PermissionError(errno.EACCES, what, str(url)) from None
    if isinstance(error, _FINAL) or (isinstance(error, OSError) and error.errno in _FINAL_CODES):
        if (
            url.user or url.query
        ):  # neither reaches a message; others keep the code of the store in their cause
            raise type(error)(error.errno, without_secrets(str(error)), str(url)) from None
        raise error


def _reason(error: Exception) -> str:
    lines = without_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
