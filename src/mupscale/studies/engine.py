"""Optuna storages for several workers: PostgreSQL that may restart, or a journal file whose lock is freed when its holder dies.

Opens storages and decides which failed calls are retried. Knows nothing about trials.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from ..errors import MupscaleError

_log = logging.getLogger(__name__)
PATIENCE = 600.0
"""Seconds for which the database may be unreachable before a worker gives up."""
T = TypeVar("T")
_FIRST_LINE = 4096  # bytes; the first entry of a journal is far shorter
_PAUSES = random.Random()  # a separate generator: those of the user's loop are not touched


class Flock(JournalFileOpenLock):
    """A lock held by the operating system, which releases it when the worker is killed."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path, self._file = path, -1

    def acquire(self) -> bool:
        self._file = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._mend()
        return True

    def _mend(self) -> None:
        """Truncate a last line that a killed writer left unfinished."""
        with open(self._path, "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            tail = 0
            while tail < size:
                tail = min(size, tail + 4096)
                file.seek(size - tail)
                piece = file.read(tail)
                if b"\n" in piece:
                    file.truncate(size - tail + piece.rindex(b"\n") + 1)
                    return
            file.truncate(0)

    def release(self) -> None:
        os.close(self._file)


def open_storage(storage: str | Path | BaseStorage) -> BaseStorage:
    """Open `postgresql://…` or the path of a journal file; a storage object is returned as it is."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(storage, BaseStorage):
        return storage
    text = str(storage)
    scheme, separator, rest = text.partition("://")
    if not separator:
        path = Path(text).absolute()
        _check_journal(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=Flock(str(path))))
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise MupscaleError(
            f"storage {scheme}://…: expected postgresql://user@host/database, or the path of a journal file for one machine",
            code="store.unknown_scheme",
        )
    url = f"postgresql+psycopg://{rest}"
    _check_url(url)
    options = {"pool_pre_ping": True, "pool_size": 2, "connect_args": {"connect_timeout": 10}}
    return again(lambda: RDBStorage(url, engine_kwargs=options), patience=60.0)


def _check_journal(path: Path) -> None:
    """Refuse a path that holds something else: workers append to the file and would damage it."""
    if path.is_dir():
        raise MupscaleError(
            f"storage {path}: a folder, expected the path of a journal file", code="store.journal_is_a_folder"
        )
    try:
        with open(path, "rb") as file:
            line = file.readline(_FIRST_LINE)
    except FileNotFoundError:
        return
    unfinished = len(line) < _FIRST_LINE and not line.endswith(b"\n")
    if line and not (line.startswith(b"{") and (b'"op_code"' in line or unfinished)):
        raise MupscaleError(
            f"storage {path}: another file, expected a journal of mupscale tune or a new path",
            code="store.not_a_journal",
        )


def _check_url(url: str) -> None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        make_url(url)
    except (ArgumentError, ValueError):  # their messages may contain the password
        raise MupscaleError(
            "storage postgresql://…: this address cannot be read, expected postgresql://user@host:5432/database",
            code="store.address_unreadable",
        ) from None


def again(call: Callable[[], T], patience: float = PATIENCE) -> T:
    """The result of a call to a storage, retried with increasing pauses while the database is unreachable.

    >>> answers = iter([StorageInternalError(), 7])
    >>> def call():
    ...     if isinstance(answer := next(answers), Exception): raise answer
    ...     return answer
    >>> again(call)
    7
    """
    began, pause, warned = monotonic(), 0.1, False
    while True:
        try:
            return call()
        except Exception as error:
            if not _passes(error):
                raise
            away = monotonic() - began
            if away > patience:
                why = str(error.__cause__ or error).splitlines()[0]
                raise MupscaleError(
                    f"the database was unreachable for {away:.0f} s: {why}; start it, or check --storage, and run again",
                    code="store.database_unreachable",
                ) from error
            if away > 5 and not warned:
                _log.warning("waiting for the database, %.0f s at most …", patience)
                warned = True
        sleep(pause * (0.5 + _PAUSES.random()))
        pause = min(2 * pause, 10.0)


def _passes(error: Exception) -> bool:
    """Whether an error is temporary: an unreachable database, or two workers creating the same tables at once."""
    if isinstance(error, StorageInternalError):
        return True
    from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError, ProgrammingError

    return isinstance(error, (OperationalError, InterfaceError, IntegrityError, ProgrammingError))
