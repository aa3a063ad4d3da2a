"""Every system call fails once while a checkpoint grows: what is published is right, what is refused has a code, and the same
command finishes it.

The shim has to be preloaded, so `harness.syscalls.every_call_fails_once` starts this as a process of its own. Four settings: one
worker, one worker with optimizer state, two workers at once, and a store from which the base comes and to which the result
goes. For each, a run in which nothing fails says which calls there are; then a drawn part of them fails, one in each run.
Control: a program that ignores failed syncs, in which only syncs fail, must be found out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from harness.forks import contents
from harness.limited import HANG, limited, silent
from harness.object_store import ObjectStore, object_store
from harness.tiny_llama import new
from mupscale.checkpoints import grow_directory
from mupscale.checkpoints.growth_job import job_of
from mupscale.checkpoints.request import Request
from mupscale.checkpoints.state.trainer_state import trainer_order
from mupscale.errors import MupscaleError
from mupscale.families.config.goal import Goal
from mupscale.families.plan import family_plan
from mupscale.jobs import partial as partial_directory
from mupscale.jobs.bytes import output_files
from mupscale.jobs.job import PAGE
from mupscale.storage import remote
from mupscale.storage.location import location

from . import CALLS, HOW, Shim

SECONDS = 5
"""Of the processor that a run may take, which takes a tenth of one."""
WHOLE = {"one worker": 180, "with state": 60, "two workers": 80, "store": 30}
QUICK = {"one worker": 20, "with state": 4, "two workers": 6, "store": 2}
"""How many faults of each setting are drawn."""
LASTING = {
    "pwrite": ("zero", "ENOSPC"), "write": ("zero",), "fsync": ("EIO",), "fdatasync": ("EIO",), "connect": ("ECONNREFUSED",)
}  # fmt: skip
"""Calls of which all after the first fail too."""
DEAD = ("write", "pwrite", "fsync", "fdatasync", "rename", "open", "readdir", "stat")
"""Calls after which everything fails, as on a disk that is gone."""
SYNCS, CONTROLS = ("fsync", "fdatasync"), 4
WELL = ("written", "share")
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
REQUEST = Request(Goal.parse(2, by="units"), noise=("copied", 1.0), shard_bytes=20_000)


class Fault(NamedTuple):
    """One call that fails."""

    setting: str
    call: str
    at: int
    how: str
    lasting: int = 0

    def __str__(self) -> str:
        after = ("", ", and all after it", ", and every call after it")[self.lasting]
        return f"{self.setting}: {self.call} {self.at} with {self.how}{after}"


class End(NamedTuple):
    """How a worker ended: "written", "share", "refused", or in none of the ways that are allowed, "foreign" and "stuck"."""

    word: str
    said: str = ""


class Disk:
    """A folder that holds a result."""

    def __init__(self, out: Path) -> None:
        self.out: Any = out

    def found(self) -> dict[str, bytes] | None:
        """What readers see; None if nothing is published."""
        return contents(self.out) if os.path.lexists(self.out) else None

    def left(self) -> list[str]:
        """What lies next to the result."""
        return [name for name in os.listdir(self.out.parent) if name != self.out.name]

    def clear(self) -> None:
        for name in os.listdir(self.out.parent):
            shutil.rmtree(self.out.parent / name)


class Bucket:
    """A folder of a store that holds a result."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.out = store, "s3://models/wide"

    def found(self) -> dict[str, bytes] | None:
        names = self.store.names("models", "wide/")
        if "mupscale.json" not in names:
            return None
        return {name: self.store.get(f"models/wide/{name}") for name in names}

    def left(self) -> list[str]:
        _, uploads = self.store.call("GET", "/models?uploads")
        return self.store.names("models", "wide.partial/") + ["an upload"] * uploads.count(b"<UploadId>")

    def clear(self) -> None:
        for name in self.store.names("models", "wide"):
            self.store.call("DELETE", f"/models/wide{name}")


class Setting:
    """One way to grow the base, what it gives undisturbed, and its calls."""

    def __init__(
        self, name: str, shim: Shim, place: Disk | Bucket, base: Path | str, workers: int = 1
    ) -> None:
        self.name, self.shim, self.place = name, shim, place
        shares = [None] if workers == 1 else [(at, workers) for at in range(workers)]
        self.works = [partial(_grow, base, place.out, share) for share in shares]
        self.failed: list[tuple[str, str]] = []
        """Kind of failure, and what happened."""
        self.ends: Counter[str] = Counter()
        self.faults = 0
        shim.count()
        ends = self.run()
        self.counts, unsynced = shim.counts, shim.unsynced
        shim.stop()
        found = place.found()
        if "written" not in [end.word for end in ends] or found is None or place.left():
            raise SystemExit(f"{name}: the undisturbed run ended with {ends} and left {place.left()}")
        self.want = found
        if unsynced:
            self.failed.append(
                ("lost", f"{name}: {unsynced} descriptors closed with bytes never synced through them")
            )
        place.clear()

    def run(self) -> list[End]:
        """How each worker ended. The workers run at once."""
        ended = limited(silent(lambda: _at_once(self.works)), SECONDS, memory=1 << 30)
        if ended.done:
            return [End(*one) for one in ended.value]
        return [End("stuck" if ended.value == HANG else "foreign", str(ended.value))]

    def possible(self, calls: tuple[str, ...] = CALLS) -> Iterator[list[Fault]]:
        """All that can fail, by the kind of call."""
        for call in calls:
            numbers = range(1, self.counts[call] + 1)
            made = [Fault(self.name, call, at, how) for at in numbers for how in HOW.get(call, ("EIO",))]
            made += [Fault(self.name, call, at, how, 1) for at in numbers for how in LASTING.get(call, ())]
            if call in DEAD and isinstance(self.place, Disk):
                made += [Fault(self.name, call, at, "EIO", 2) for at in numbers]
            yield made

    def fail(self, fault: Fault) -> None:
        """Run with one fault, then without, and judge what is there after each."""
        shim = self.shim
        shim.fail(fault.call, fault.at, fault.how, fault.lasting)
        ends = self.run()
        shim.stop()
        if shim.fired:
            self.faults += 1
            self.ends.update(end.word for end in ends)
            wrong = [*self._after(ends), *self._again(ends)]
            self.failed += [(kind, f"{fault}, at {shim.where}: {what}") for kind, what in wrong]
        self.place.clear()

    def _after(self, ends: list[End]) -> Iterator[tuple[str, str]]:
        """What is wrong after a run with a fault."""
        for end in ends:
            if end.word in ("stuck", "foreign"):
                yield ("stuck" if end.word == "stuck" else "spurious"), end.said
        found = self.place.found()
        if found is not None and found != self.want:
            yield "published_wrong", _difference(found, self.want)
        if found is None and {end.word for end in ends} == {"written"}:
            yield "lost", "every worker ended well, and nothing is there"
        if self.shim.journalled:
            yield "lost", "a journal was written to, or the result published, after a sync that failed"

    def _again(self, ends: list[End]) -> Iterator[tuple[str, str]]:
        """What is wrong after the same commands were run again."""
        if not {end.word for end in ends}.difference(WELL) and self.place.found() and not self.place.left():
            return
        again = self.run()
        if {end.word for end in again}.difference(WELL) or "written" not in [end.word for end in again]:
            yield "lost", f"ended with {ends}, and run again with {again}"
        elif (found := self.place.found()) != self.want:
            yield "published_wrong", f"run again: {_difference(found or {}, self.want)}"
        elif self.place.left():
            yield "lost", f"left over: {self.place.left()}"


def _difference(found: Mapping[str, bytes], want: Mapping[str, bytes]) -> str:
    return ", ".join(sorted(name for name in {*found, *want} if found.get(name) != want.get(name)))


def _grow(base: Path | str, out: Path | str, share: tuple[int, int] | None) -> str:
    options = grow_directory.Options(measure=False, share=share)
    outcome = grow_directory.grow_directory(location(base), location(out), REQUEST, options).outcome
    return "share" if outcome == "share written" else "written"


def _at_once(works: Sequence[Callable[[], str]]) -> list[End]:
    """How each ended, each in a process of its own but the last."""
    others = []
    for work in works[:-1]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, json.dumps(_end(work)).encode())
            finally:
                os._exit(0)
        os.close(write)
        others.append((child, read))
    last = _end(works[-1])
    ends = []
    for child, read in others:
        with open(read, "rb") as answer:
            said = answer.read()
        os.waitpid(child, 0)
        ends.append(End(*json.loads(said)) if said else End("stuck", HANG))
    return [*ends, last]


def _end(work: Callable[[], str]) -> End:
    try:
        return End(work())
    except MupscaleError as error:
        return End("refused" if all(error.codes) else "foreign", " ".join(error.codes))
    except BaseException as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return End("foreign", f"{type(error).__name__}: {error}; {' '.join(frames[-6:])}")


@contextmanager
def small_steps(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A small base, without and with optimizer state, which is planned once and in this process."""
    model, plain, state = new(**SIZES), folder / "base", folder / "stateful"
    model.save_pretrained(plain, max_shard_size="8KB")
    (plain / "tokenizer.json").write_text("{}")
    shutil.copytree(plain, state)
    named = dict(model.named_parameters())
    decayed, bare = ([named[name] for name in names] for names in trainer_order(model, {}))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    model(input_ids=torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), state / "optimizer.pt")
    plan = family_plan(json.loads((plain / "config.json").read_text()), "2", by="units")
    with ExitStack() as stack:
        for module, name, value in (
            (grow_directory, "plan_in_process", lambda *_, **__: plan),
            (grow_directory, "refuse_jump", lambda family: None),  # the plan was not proved
            (grow_directory, "_job", lambda base, out, about, state: job_of(base, out, about)),
            (output_files, "LEAST", PAGE),
            (partial_directory, "PATIENCE", 0.5),
            (remote, "PAUSES", (0.01,) * 3),
        ):
            stack.enter_context(patch.object(module, name, value))
        for base in (
            plain,
            state,
        ):  # what is loaded and compiled here is there in every process that is forked
            _grow(base, folder / f"{base.name}-wide", None)
        yield plain, state


def careless(real: Callable[[int], None]) -> Callable[[int], None]:
    """A sync whose errors are ignored."""

    def sync(descriptor: int) -> None:
        with suppress(OSError):
            real(descriptor)

    return sync


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    draw, settings = random.Random(chosen.seed), list[Setting]()
    drawn = QUICK if chosen.quick else WHOLE
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        plain, state = stack.enter_context(small_steps(folder))
        (folder / "out").mkdir()
        disk, shim = Disk(folder / "out" / "wide"), Shim(folder)
        gc.freeze()

        def work_through(setting: Setting, count: int, calls: tuple[str, ...] = CALLS) -> None:
            kinds = [draw.sample(faults, len(faults)) for faults in setting.possible(calls)]
            in_turn = [fault for row in zip_longest(*kinds) for fault in row if fault is not None]
            for fault in in_turn[:count]:
                setting.fail(fault)
            settings.append(setting)

        work_through(Setting("one worker", shim, disk, plain), drawn["one worker"])
        work_through(Setting("with state", shim, disk, state), drawn["with state"])
        work_through(Setting("two workers", shim, disk, plain, 2), drawn["two workers"])
        with ExitStack() as planted:
            for call in SYNCS:
                planted.enter_context(patch.object(os, call, careless(getattr(os, call))))
            work_through(Setting("syncs ignored", shim, disk, plain), CONTROLS, SYNCS)
        store = stack.enter_context(object_store(smallest=1024))
        store.put(plain, "models/base")
        stack.enter_context(patch.dict(os.environ, store.environment))
        far = Shim(Path("/nothing"), store.proxy)
        work_through(Setting("store", far, Bucket(store), "s3://models/base"), drawn["store"])
    (control,) = (setting for setting in settings if setting.name == "syncs ignored")
    settings.remove(control)
    return {
        "faults": sum(setting.faults for setting in settings),
        "ends": sum((setting.ends for setting in settings), Counter()),
        "failed": [failure for setting in settings for failure in setting.failed],
        "control": [what for _, what in control.failed],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    print(json.dumps(measure(parser.parse_args())))
