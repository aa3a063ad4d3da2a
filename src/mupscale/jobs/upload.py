"""A job whose output is an object store: parts are sent as they are made, and become files when all of them are there.

`<out>.partial/` holds the job, the ids of the uploads and journals as small objects; `<out>/` stays empty until every part
of every file is in the store. Then uploads are completed, small files follow, the configuration last but one, the job's own file
last: with it the output is complete. Every step may be repeated or be done by two processes at once. A part counts if a
journal names it and the store still has it under the same name. Does not know how bytes are made.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from ..errors import Fault, MupscaleError
from ..files.strict import os_errors, parse_json, read_regular
from ..storage.location import Url
from ..storage.looking import exists, names_in
from ..storage.uploads import (
    abort,
    begin,
    check_writable,
    complete,
    mark_of,
    probe,
    put,
    remove,
    send,
    sent,
    uploads_in,
)
from .agreement import base_fingerprints, output_fingerprints
from .base_reader import BaseReader, encoded, encoded_sums
from .blocks import MoveMaker, Reader, raw_bytes
from .compiled_sums import expect
from .identity import check_base, check_stamps, published, stretch_sums
from .job import Job
from .job_check import JOB
from .journal import Journals, entries_of, line, note
from .partial import carried_files, check_same_job, is_complete, text_files, working_job
from .parts import FilePart, parts_of, share_of
from .recheck import block_runs, block_sum
from .threads import in_threads
from .work_units import Block, Stretch, WorkUnits

_UPLOADS = "uploads.json"
_JOURNAL = "journal-"
_LONGEST = 1 << 30  # bytes of a job or a journal; bounds what a foreign object can fill memory with
GROUP_BYTES = (
    128 << 20
)  # sent between two entries of a journal, which is an object each: a kill repeats one group
_GROUP_SECONDS = 2.0  # or after this time, so that slow lines lose little


def upload_share(
    job: Job,
    out: Url,
    share: tuple[int, int],
    threads: int,
    report: Callable[[int, int], None] | None = None,
) -> bool:
    """Do worker i of n's share of a job whose output is a store, and publish it if nothing is left; True if it is complete."""
    check_writable(out)
    with os_errors(out):
        return _Upload(job, out, share, threads, report).run()


@dataclass
class _State:
    """What the store has of a job."""

    done: Journals
    parts: dict[int, str]
    """Part -> its name in the store, for parts that need not be sent again."""


class _Upload:
    def __init__(
        self,
        job: Job,
        out: Url,
        share: tuple[int, int],
        threads: int,
        report: Callable[[int, int], None] | None,
    ) -> None:
        self.job, self.out, self.threads, self.report = job, out, threads, report
        self.folder = working_job(out).parent
        self.units = WorkUnits(job)
        self.parts = parts_of(job, self.units)
        self.mark = hashlib.blake2b(published(job).encode(), digest_size=16).hexdigest()
        mine = share_of(self.parts, *share)
        again = [n for n in self.units.share(*share) if n >= self.units.blocks]
        self.share = (mine, again)
        self.md5 = False  # whether the store calls parts by the MD5 of their bytes
        self.name = f"{_JOURNAL}{share[0]:05d}-of-{share[1]:05d}-{secrets.token_hex(4)}"

    def run(self) -> bool:
        job = self.job
        if is_complete(self.out, job):
            self._clear()
            return True
        stamps = check_base(job)
        self.md5 = probe(_url(self.folder))
        self._claim()
        uploads = self._uploads()
        state = self._state(uploads)
        check_stamps(state.done.stamps, stamps)
        expect(sum(part.size for part in self.parts))
        self._work(uploads, state, stamps)
        check_stamps({name: {stamp} for name, stamp in stamps.items()}, check_base(job))
        state = self._state(uploads)
        if not state.done.all or len(state.parts) < len(self.parts):
            return is_complete(self.out, job)  # parts of other workers are missing, or one has published it
        self._publish(uploads, state)
        return True

    def _claim(self) -> None:
        """Write the job next to the output, unless it is there; another job in its place is refused."""
        there = working_job(self.out)
        if not exists(there):
            odd = [name for name in names_in(self.out) if name]
            if odd:
                what = f"it holds {odd[0]}, which this job did not write"
                remedy = "name another output, or remove it"
                raise MupscaleError(
                    f"{self.out} is not empty", [Fault("directory.not_empty", str(self.out), what, remedy)]
                )
            put(_url(there), self.job.to_json().encode(), only_new=True)
        check_same_job(read_regular(there, _LONGEST), self.job, self.folder)

    def _uploads(self) -> dict[str, str]:
        """The id of the upload of every file: those of the first worker that wrote them down. Others are given up."""
        there = _url(self.folder) / _UPLOADS
        if not exists(there):
            own = {file.name: begin(self.out / file.name, self.mark) for file in self.job.files}
            put(there, json.dumps(own).encode(), only_new=True)
        found = dict(parse_json(read_regular(there), str(there)))
        lost = [n for n, upload in found.items() if not self._is_there(n, upload)]
        if lost:  # given up by a rule of the store for uploads that take long: these files begin again
            found |= {name: begin(self.out / name, self.mark) for name in lost}
            put(there, json.dumps(found).encode())
        known = set(found.values())
        for url, upload in uploads_in(self.out):
            if upload not in known:
                abort(url, upload)
        return {name: str(upload) for name, upload in found.items()}

    def _is_there(self, name: str, upload: str) -> bool:
        """Whether an upload is under way, or was completed."""
        return sent(self.out / name, upload) is not None or self._is_published(name)

    def _is_published(self, name: str) -> bool:
        size = next(file.size for file in self.job.files if file.name == name)
        return mark_of(self.out / name) == (self.mark, size)

    def _state(self, uploads: dict[str, str]) -> _State:
        count = len(self.units)
        done, named = Journals(bytearray(count), bytearray(count)), dict[int, dict[str, set[str]]]()
        for name in names_in(self.folder):
            if name.startswith(_JOURNAL):
                entries = entries_of(read_regular(self.folder / name, _LONGEST))
                note(done, entries)
                for entry in entries:
                    if entry.startswith("p "):
                        _, number, upload, etag = entry.split(" ")
                        named.setdefault(int(number), {}).setdefault(upload, set()).add(etag)
        stored = {name: sent(self.out / name, upload) for name, upload in uploads.items()}
        whole = {name for name, found in stored.items() if found is None and self._is_published(name)}
        kept = {}
        for at, part in enumerate(self.parts):
            file = part.file.name
            told = named.get(at, {}).get(
                uploads[file], set()
            )  # the same bytes may get another name each time
            etag, size = (stored[file] or {}).get(part.number, ("", 0))
            if etag in told and size == part.size:
                kept[at] = etag
            elif told and file in whole:
                kept[at] = min(told)
        return _State(done, kept)

    def _work(self, uploads: dict[str, str], state: _State, stamps: dict[str, str]) -> None:
        mine, again = self.share
        parts = [number for number in mine if number not in state.parts]
        stretches = [number for number in again if not state.done.units[number]]
        total = sum(self.parts[number].size for number in mine)
        left = sum(self.parts[number].size for number in parts)
        keeper = _PartKeeper(_url(self.folder), self.name, total, total - left, self.report)
        if parts or stretches:
            keeper.add([f"s {stamp} {name}" for name, stamp in stamps.items()], 0)
        try:
            in_threads(self.threads, parts, lambda todo: self._send(todo, uploads, keeper))
            in_threads(self.threads, stretches, lambda todo: self._read_again(todo, keeper))
        finally:
            keeper.flush()

    def _send(self, todo: Iterator[int], uploads: dict[str, str], keeper: _PartKeeper) -> None:
        sizes = {file.name: file.size for file in self.job.sources}
        files = {name: number for number, name in enumerate(sizes)}
        with BaseReader(self.job.base, sizes) as reader:
            maker = MoveMaker(reader)
            for number in todo:
                part = self.parts[number]
                raw, entries = self._made(part, maker, reader, files)
                upload = uploads[part.file.name]
                etag = send(self.out / part.file.name, upload, part.number, raw, md5=self.md5)
                keeper.add([*entries, f"p {number} {upload} {etag}"], part.size)

    def _made(
        self, part: FilePart, maker: MoveMaker, reader: BaseReader, files: dict[str, int]
    ) -> tuple[bytearray, list[str]]:
        """The bytes of a part, and what a journal says of its blocks."""
        room, entries = bytearray(part.size), []
        for at, raw in part.fixed():
            room[at : at + len(raw)] = raw
        for number in part.blocks:
            block = self.units[number]
            assert isinstance(block, Block)
            made = raw_bytes(maker.block(block))
            for offset, run in block_runs(block, made):
                room[offset - part.start : offset - part.start + len(run)] = run
            entries.append(f"b {number} {block_sum(block, made)} {encoded(reader.taken(), files)}")
        return room, entries

    def _read_again(self, todo: Iterator[int], keeper: _PartKeeper) -> None:
        with Reader(self.job.base) as reader:
            for number in todo:
                stretch = self.units[number]
                assert isinstance(stretch, Stretch)
                sums = stretch_sums(reader, self.job.sources[stretch.file].name, stretch)
                keeper.add([f"d {number} {encoded_sums(sums)}"], 0)

    def _publish(self, uploads: dict[str, str], state: _State) -> None:
        """Everything is there: make it visible, the job's own file last, and clear up."""
        job = self.job
        base = base_fingerprints(job, self.units, state.done)
        small = text_files(job, base, output_fingerprints(job, self.units, state.done.sums))
        for name, upload in uploads.items():
            named = {
                part.number: state.parts[number]
                for number, part in enumerate(self.parts)
                if part.file.name == name
            }
            complete(self.out / name, upload, named)
            if not self._is_published(name):
                raise MupscaleError(
                    f"{self.out / name} was not completed by the store; run the same command again",
                    code="store.upload_not_completed",
                )
        for name, raw in (*carried_files(job), *small, (JOB, published(job).encode())):
            put(self.out / name, raw)
        self._clear()

    def _clear(self) -> None:
        """Remove what only workers need, and uploads that nobody will complete."""
        for url, upload in (*uploads_in(self.out), *uploads_in(_url(self.folder))):
            abort(url, upload)
        for name in sorted(names_in(self.folder), key=lambda name: name == working_job(self.out).name):
            remove(_url(self.folder) / name)


class _PartKeeper:
    """Collects what was done, writes it down from time to time, and reports it."""

    def __init__(
        self, folder: Url, name: str, total: int, done: int, report: Callable[[int, int], None] | None
    ) -> None:
        self._folder, self._name, self._total, self._done, self._report = folder, name, total, done, report
        self._lock = Lock()
        self._entries: list[str] = []
        self._bytes, self._written, self._count = 0, monotonic(), 0

    def add(self, entries: list[str], sent: int) -> None:
        with self._lock:
            self._entries += entries
            self._bytes += sent
            self._done += sent
            if self._report is not None and sent:
                self._report(self._done, self._total)
            due = self._bytes >= GROUP_BYTES or monotonic() - self._written >= _GROUP_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            entries, number = self._entries, self._count
            self._entries, self._bytes, self._written, self._count = [], 0, monotonic(), number + 1
        if entries:
            put(self._folder / f"{self._name}-{number:06d}.log", b"".join(map(line, entries)))


def _url(where: object) -> Url:
    assert isinstance(where, Url)
    return where
