"""A job whose output is an object store: parts are sent as they are made, and become files when all of them are there.

`<out>.partial/` holds the job, the ids of the uploads and journals as small objects; `<out>/` stays empty until every part
of every file is in the store. Then uploads are completed, small files follow, the configuration last but one, the job's own file
last: with it the output is complete. Every step may be repeated or be done by two processes at once. A part counts if a
journal names it and the store still has it under the same name. Does not know how bytes are made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

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
from .bytes.base_reader import BaseReader, encoded, encoded_sums
from .bytes.blocks import MoveMaker, Reader, block_runs, block_sum, finite_moves, raw_bytes
from .bytes.compiled_sums import expect
from .digests import check_base, check_stamps, stretch_sums
from .finished import is_complete, published
from .job import Job
from .journal.entries import BaseStamp, BlockDone, PartSent, StretchRead
from .journal.journals import Journals, read_journals
from .journal.writer import JournalWriter, StoreSink
from .partial import carried_files, check_same_job, text_files, working_job
from .progress import Count, Report
from .same_base import base_fingerprints, output_fingerprints
from .threads import in_threads
from .upload_parts import FilePart, parts_of, share_of
from .work_units import Block, Stretch, WorkUnits

_UPLOADS = "uploads.json"
_LONGEST = 1 << 30  # bytes of a job or a journal; bounds what a foreign object can fill memory with


def upload_share(
    job: Job,
    out: Url,
    share: tuple[int, int],
    threads: int,
    report: Report | None = None,
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
        report: Report | None,
    ) -> None:
        self.job, self.out, self.threads, self.report = job, out, threads, report
        self.folder = working_job(out).parent
        self.units = WorkUnits(job)
        self.parts = parts_of(job, self.units)
        self.mark = hashlib.blake2b(published(job).encode(), digest_size=16).hexdigest()
        mine = share_of(self.parts, *share)
        again = [n for n in self.units.share(*share) if n >= self.units.blocks]
        self.share = (mine, again)
        self.worker = share
        self.md5 = False  # whether the store calls parts by the MD5 of their bytes

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
        done = read_journals(self.folder, len(self.units))
        stored = {name: sent(self.out / name, upload) for name, upload in uploads.items()}
        whole = {name for name, found in stored.items() if found is None and self._is_published(name)}
        kept = {}
        for at, part in enumerate(self.parts):
            file = part.file.name
            named = done.parts.get(at, {}).get(uploads[file], set())
            etag, size = (stored[file] or {}).get(part.number, ("", 0))
            if etag in named and size == part.size:
                kept[at] = etag
            elif named and file in whole:
                kept[at] = min(named)
        return _State(done, kept)

    def _work(self, uploads: dict[str, str], state: _State, stamps: dict[str, str]) -> None:
        mine, again = self.share
        parts = [number for number in mine if number not in state.parts]
        stretches = [number for number in again if not state.done.units[number]]
        total = sum(self.parts[number].size for number in mine)
        if not (parts or stretches):
            return
        count = Count(total, sum(self.parts[number].size for number in parts), self.report)
        with JournalWriter(StoreSink(_url(self.folder), *self.worker)) as journal:
            journal.add(*(BaseStamp(name, stamp) for name, stamp in stamps.items()))
            in_threads(self.threads, parts, lambda todo: self._send(todo, uploads, journal, count))
            in_threads(self.threads, stretches, lambda todo: self._read_again(todo, journal))

    def _send(
        self, todo: Iterator[int], uploads: dict[str, str], journal: JournalWriter, count: Count
    ) -> None:
        sizes = {file.name: file.size for file in self.job.sources}
        files = {name: number for number, name in enumerate(sizes)}
        with BaseReader(self.job.base, sizes) as reader:
            maker = MoveMaker(reader, finite_moves(self.job.moves, self.job.about))
            for number in todo:
                part = self.parts[number]
                raw, blocks = self._made(part, maker, reader, files)
                upload = uploads[part.file.name]
                etag = send(self.out / part.file.name, upload, part.number, raw, md5=self.md5)
                journal.add(*blocks, PartSent(number, upload, etag), size=part.size)
                count.add(part.size)

    def _made(
        self, part: FilePart, maker: MoveMaker, reader: BaseReader, files: dict[str, int]
    ) -> tuple[bytearray, list[BlockDone]]:
        """The bytes of a part, and what a journal says of its blocks."""
        room, blocks = bytearray(part.size), []
        for at, raw in part.fixed():
            room[at : at + len(raw)] = raw
        for number in part.blocks:
            block = self.units[number]
            assert isinstance(block, Block)
            made = raw_bytes(maker.block(block))
            for offset, run in block_runs(block, made):
                room[offset - part.start : offset - part.start + len(run)] = run
            blocks.append(BlockDone(number, block_sum(block, made), encoded(reader.taken(), files)))
        return room, blocks

    def _read_again(self, todo: Iterator[int], journal: JournalWriter) -> None:
        with Reader(self.job.base) as reader:
            for number in todo:
                stretch = self.units[number]
                assert isinstance(stretch, Stretch)
                sums = stretch_sums(reader, self.job.sources[stretch.file].name, stretch)
                journal.add(StretchRead(number, encoded_sums(sums)))

    def _publish(self, uploads: dict[str, str], state: _State) -> None:
        """Everything is there: make it visible, the record last, and clear up."""
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
        for name, raw in (*carried_files(job), *small):
            put(self.out / name, raw)
        self._clear()

    def _clear(self) -> None:
        """Remove what only workers need, and uploads that nobody will complete."""
        for url, upload in (*uploads_in(self.out), *uploads_in(_url(self.folder))):
            abort(url, upload)
        for name in sorted(names_in(self.folder), key=lambda name: name == working_job(self.out).name):
            remove(_url(self.folder) / name)


def _url(where: object) -> Url:
    assert isinstance(where, Url)
    return where
