"""Where a file or a folder is: a path of this machine, or a URL such as `s3://bucket/model`.

Knows how URLs are spelled. Opens nothing, and imports no package of an object store.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Url:
    """A file or a folder in a store. It is spelled like a path, and has the few operations of one that need no request.

    >>> model = Url("s3", "bucket/model")
    >>> str(model / "config.json"), model.name, str(model.parent)
    ('s3://bucket/model/config.json', 'model', 's3://bucket')
    """

    scheme: str
    path: str

    def __truediv__(self, name: str) -> Url:
        return replace(self, path=f"{self.path}/{name}") if name else self

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

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
    """
    if not isinstance(given, str):
        return given
    found = _URL.match(given)
    if found is None:
        return Path(given)
    if found[1] == "file":
        return Path(unquote(urlsplit(given).path))
    return Url(found[1], found[2].rstrip("/"))


def absolute(given: str | Location) -> Location:
    """The same location, whatever the current directory becomes."""
    where = location(given)
    return where if isinstance(where, Url) else Path(os.path.abspath(where))
