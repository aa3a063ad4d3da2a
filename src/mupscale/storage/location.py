"""Where a file or a folder is: a path of this machine, or a URL such as `s3://bucket/model`.

Knows how URLs are spelled, and which parts of one are secret: name and password before the host, and the query, which holds
the signature of a presigned URL. As text a `Url` is without them; `full` is what requests are made with. Opens nothing, and
imports no package of an object store.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(?:([^/?#]*)@)?([^?]*)(?:\?(?=[^/]*=)([^/]*))?(.*)", re.DOTALL)
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,2})[^\s/?#'\"]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s?'\"]*)\?[^\s'\"]*=[^\s'\"]*")


@dataclass(frozen=True, slots=True)
class Url:
    """A file or a folder in a store. It is spelled like a path, and has the few operations of one that need no request.

    >>> model = Url("s3", "bucket/model")
    >>> str(model / "config.json"), model.name, str(model.parent)
    ('s3://bucket/model/config.json', 'model', 's3://bucket')
    """

    scheme: str
    path: str
    user: str = field(default="", repr=False, compare=False)
    """Name and password, as they stand before the host."""
    query: str = field(default="", repr=False, compare=False)

    def __truediv__(self, name: str) -> Url:
        return replace(self, path=f"{self.path}/{name}") if name else self

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    @property
    def full(self) -> str:
        """The URL with its secrets, for requests; it goes into no message and no file."""
        user, query = f"{self.user}@" if self.user else "", f"?{self.query}" if self.query else ""
        return f"{self.scheme}://{user}{self.path}{query}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return replace(self, path=self.path.rpartition("/")[0])

    def with_name(self, name: str) -> Url:
        return self.parent / name

    def is_relative_to(self, other: Location) -> bool:
        """Whether this lies in `other`, or is the same."""
        return isinstance(other, Url) and f"{self}/".startswith(f"{other}/")


Location = Path | Url
"""A file or a folder, on this machine or in a store."""


def location(given: str | Location) -> Location:
    """What a text, a path or a URL means.

    >>> location("s3://bucket/model/"), location("file:///tmp/a%20b"), location("org/model")
    (Url(scheme='s3', path='bucket/model'), PosixPath('/tmp/a b'), PosixPath('org/model'))
    >>> signed = location("https://me:word@host/model?X-Amz-Signature=1f") / "config.json"
    >>> str(signed), signed.full
    ('https://host/model/config.json', 'https://me:word@host/model/config.json?X-Amz-Signature=1f')
    """
    if not isinstance(given, str):
        return given
    found = _URL.match(given)
    if found is None:
        return Path(given)
    if found[1] == "file":
        return Path(unquote(urlsplit(given).path))
    scheme, user, path, query, rest = found.groups()
    return Url(scheme, (path + rest).rstrip("/"), user or "", query or "")


def absolute(given: str | Location) -> Location:
    """The same location, whatever the current directory becomes."""
    where = location(given)
    return where if isinstance(where, Url) else Path(os.path.abspath(where))


def without_secrets(text: str) -> str:
    """A text in which no URL has a name, a password or a query.

    >>> without_secrets("403 for https://me:word@host/model?X-Amz-Signature=1f, 'postgresql://u:word@db/x'")
    "403 for https://…@host/model?… 'postgresql://…@db/x'"
    """
    return _QUERY.sub(r"\1?…", _USER.sub(r"\1…@", text))
