"""Whatever lies in a directory, the outcome is a `MupscaleError` or a harmless success.

Two thousand directories with mutated headers, indexes and configs, and some hundred mutated jobs, are read and, where
they pass, widened, in one process of its own: it must never see another exception, a hang, a file written
outside its output, or more than 1 GiB of memory.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mupscale as mu
from harness.refusals import refusal
from mupscale.checkpoints.shards import weight_moves
from mupscale.files.directory import read_directory
from mupscale.jobs.digests import make_job
from mupscale.jobs.job import Text
from mupscale.jobs.job_check import sound_job
from mupscale.jobs.worker import run_job

DIRECTORIES, JOBS = 2000, 300
PATIENCE = 20  # processor seconds per case; a case that waits instead of computing has 15 times as long
"""Seconds a case may take before it counts as a hang, on a machine that is busy with other work."""
MEMORY = 1 << 30

A, B, INDEX = "a.safetensors", "b.safetensors", "model.safetensors.index.json"
AXES = (mu.rules.Axis.parse("out: 3x2"), mu.rules.Axis.parse("in: 4x2"))
PLAN = mu.Plan({name: mu.plans.TensorPlan((name,), AXES) for name in ("w", "x", "y")})

Mutation = Callable[[Path, random.Random], None]
MUTATIONS: dict[str, tuple[Mutation, bool]] = {}
"""By name: what is done to a sound directory, and whether it must then be refused."""


def mutation(must_fail: bool = True) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = (function, must_fail)
        return function

    return register


def sound(path: Path) -> Path:
    """A directory of two shards that can be widened."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4, "eps": 1e-6}))
    (path / "tokenizer.json").write_text("{}")
    save_file({"w": torch.ones(3, 4), "x": torch.ones(3, 4)}, path / A, metadata={"format": "pt"})
    save_file({"y": torch.ones(3, 4)}, path / B)
    index = {"metadata": {"total_size": 144}, "weight_map": {"w": A, "x": A, "y": B}}
    (path / INDEX).write_text(json.dumps(index))
    return path


def grow(path: Path, out: Path) -> None:
    """Everything that is done to a directory, on a small scale."""
    directory = read_directory(path)
    files, moves, index = weight_moves(PLAN, directory)
    texts = [Text("config.json", json.dumps(directory.config))]
    run_job(make_job(path, out, files, moves, carried=directory.carried, texts=texts, about={"index": index}))


ODD_NAMES = (
    *("../a.safetensors", "..", ".", "", "/etc/passwd", "/tmp/x.safetensors", "x/../../y.safetensors", "a\0b", "\ud800"),
    *("sub/a.safetensors", "a" * 5000, "\n", "~/x", "..\\x.safetensors", "a.safetensors/", "CON\x7f"),
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1.5, "3", [], {}, [[]], 10**18, -(10**18), 2**63, 2**64, float("nan"), float("inf")),
    *([-1, 4], [10**12, 10**12], [1] * 200, [3, "4"], "F99", "f32", "F4", "__metadata__"),
)
REFUSED_TYPES: tuple[Any, ...] = (None, 3, [], "", "a\0b", "\ud800")
ODD_JSON = (
    *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"[" * 50_000, b'{"a":' * 20_000),
    *(b"\xff\xfe", b"{" + b" " * 9),
    *(b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e9999}', b'{"a":' + b"7" * 9000 + b"}", b'{"a":1,"a":2}'),
    *(b'{"\\ud800":1}', b"\x00" * 64, b'{"a":"' + b"\\u0000" * 99 + b'"}', b"[" + b"1," * 50_000 + b"1]"),
)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def of_header(change: Callable[[dict[str, Any], random.Random], Any]) -> None:
    """A mutation of the parsed header; it may return another one in its place."""

    def changed(path: Path, draw: random.Random) -> None:
        header, data = header_of(path / A)
        put_header(path / A, change(header, draw) or header, data)

    MUTATIONS[change.__name__] = (changed, True)


def of_index(change: Callable[[dict[str, Any], random.Random], None]) -> None:
    """A mutation of the parsed index."""

    def changed(path: Path, draw: random.Random) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index, draw)
        (path / INDEX).write_text(json.dumps(index))

    MUTATIONS[change.__name__] = (changed, True)


@mutation()
def length_of_header(path: Path, draw: random.Random) -> None:
    raw = (path / A).read_bytes()
    usual = int.from_bytes(raw[:8], "little")
    lengths = (0, 1, usual - 1, usual + 1, len(raw), 10**8, 10**8 + 1, 2**32, 2**63, 2**64 - 1)
    length = draw.choice((*lengths, draw.getrandbits(64)))
    (path / A).write_bytes(length.to_bytes(8, "little") + raw[8:])


@mutation()
def truncated(path: Path, draw: random.Random) -> None:
    name = draw.choice((A, B, INDEX))
    raw = (path / name).read_bytes()
    (path / name).write_bytes(raw[: draw.randrange(len(raw) - 1)])


@mutation()
def longer(path: Path, draw: random.Random) -> None:
    with open(path / draw.choice((A, B)), "ab") as file:
        file.write(bytes(draw.randrange(1, 100)))


@mutation()
def much_longer_and_empty(path: Path, draw: random.Random) -> None:
    os.truncate(path / draw.choice((A, B)), draw.choice((10**9, 10**12)))


@mutation(must_fail=False)
def bytes_of_header(path: Path, draw: random.Random) -> None:
    raw = bytearray((path / A).read_bytes())
    for _ in range(draw.randrange(1, 4)):
        end = 8 + int.from_bytes(raw[:8], "little") if len(raw) > 8 else 8
        raw[draw.randrange(end) % len(raw)] = draw.randrange(256)
    (path / A).write_bytes(raw)


@mutation(must_fail=False)
def bytes_of_text(path: Path, draw: random.Random) -> None:
    name = draw.choice(("config.json", INDEX))
    raw = bytearray((path / name).read_bytes())
    for _ in range(draw.randrange(1, 4)):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    (path / name).write_bytes(raw)


@of_header
def field_of_header(header: dict[str, Any], draw: random.Random) -> Any:
    entry = header[draw.choice("wx")]
    key = draw.choice(("dtype", "shape", "data_offsets"))
    entry[key] = draw.choice([value for value in ODD_VALUES if value != entry[key]])


@of_header
def offsets(header: dict[str, Any], draw: random.Random) -> Any:
    entry = header[draw.choice("wx")]
    odd = (-48, -1, 0, 1, 24, 47, 49, 95, 97, 2**40, 2**62)
    pairs = [(a, b) for a in odd for b in (a + 48, *odd) if (a, b) not in ((0, 48), (48, 96))]
    entry["data_offsets"] = draw.choice(pairs)


@of_header
def shape(header: dict[str, Any], draw: random.Random) -> Any:
    shapes: Any = (
        [12], [4, 3], [3, 4, 1], [], [0], [2**32, 2**32], [3, -4], [12, 1], [1] * 65, [10**18] * 60,
    )  # fmt: skip
    header[draw.choice("wx")]["shape"] = draw.choice(shapes)


@of_header
def name_in_header(header: dict[str, Any], draw: random.Random) -> Any:
    header[draw.choice(ODD_NAMES)] = header.pop(draw.choice("wx"))


@of_header
def quantised(header: dict[str, Any], draw: random.Random) -> Any:
    header["w"] |= {"dtype": draw.choice(("F8_E4M3", "F8_E5M2", "I8")), "shape": [48]}
    return {name: header[name] for name in ("x", "w")}


@mutation()
def whole_header(path: Path, draw: random.Random) -> None:
    put_header(path / A, draw.choice(ODD_JSON), bytes(draw.choice((0, 96))))


@of_header
def many_tensors(header: dict[str, Any], draw: random.Random) -> Any:
    count = draw.choice((1000, 5000))
    header |= {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [96, 96]} for i in range(count)}


@of_header
def metadata(header: dict[str, Any], draw: random.Random) -> Any:
    header["__metadata__"] = draw.choice((3, [], {"a": 1}, {"a": None}, "x", {"a": {"b": "c"}}))


@of_header
def double_key(header: dict[str, Any], draw: random.Random) -> Any:
    key = draw.choice(("w", "x"))
    return (json.dumps(header)[:-1] + f', "{key}": {json.dumps(header[key])}}}').encode()


@of_index
def file_in_index(index: dict[str, Any], draw: random.Random) -> None:
    files = (*ODD_NAMES, *ODD_VALUES, B + "x", "nowhere.safetensors")
    index["weight_map"][draw.choice("wxy")] = draw.choice(files)


@of_index
def names_in_index(index: dict[str, Any], draw: random.Random) -> None:
    where = index["weight_map"]
    if draw.random() < 0.5:
        where[draw.choice(ODD_NAMES)] = where.pop(draw.choice("wxy"))
    else:
        where[draw.choice(("z", *ODD_NAMES))] = draw.choice((A, B))


@of_index
def swapped_in_index(index: dict[str, Any], draw: random.Random) -> None:
    index["weight_map"] = draw.choice(
        ({"w": B, "x": A, "y": B}, {"w": A, "x": A, "y": A}, {"w": A, "x": A}, {}, [], None, 3, {"y": B})
    )


@mutation()
def whole_index(path: Path, draw: random.Random) -> None:
    (path / INDEX).write_bytes(draw.choice(ODD_JSON))


@of_index
def large_index(index: dict[str, Any], draw: random.Random) -> None:
    index["weight_map"] |= {f"t{i}": draw.choice((A, B)) for i in range(draw.choice((1000, 5000)))}


@mutation()
def whole_config(path: Path, draw: random.Random) -> None:
    (path / "config.json").write_bytes(draw.choice(ODD_JSON))


@mutation()
def refused_config(path: Path, draw: random.Random) -> None:
    config = json.loads((path / "config.json").read_text())
    key, value = draw.choice(
        (
            *(("model_type", odd) for odd in REFUSED_TYPES),
            *(("quantization_config", odd) for odd in ({}, {"bits": 4}, 3, "x")),
            ("eps", float("nan")),
        )
    )
    (path / "config.json").write_text(json.dumps(config | {key: value}))


@mutation(must_fail=False)
def odd_config(path: Path, draw: random.Random) -> None:
    config = json.loads((path / "config.json").read_text())
    config[draw.choice(("hidden_size", "x", "\ud800", "eps"))] = draw.choice((*ODD_VALUES, *ODD_NAMES))
    (path / "config.json").write_text(json.dumps(config))


@mutation()
def missing_file(path: Path, draw: random.Random) -> None:
    (path / draw.choice(("config.json", A, B, INDEX))).unlink()


@mutation()
def not_a_file(path: Path, draw: random.Random) -> None:
    """Pipes, which block whoever opens them; folders; devices without end; links to nothing and to themselves."""
    name = path / draw.choice(("config.json", A, INDEX))
    name.unlink()
    kind: str = draw.choice(("pipe", "folder", "zero", "null", "nowhere", "itself", "above"))
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "folder":
        name.mkdir()
    else:
        targets = {"zero": "/dev/zero", "null": "/dev/null", "nowhere": "nowhere", "above": ".."}
        name.symlink_to(targets.get(kind, name))


@mutation()
def links(path: Path, draw: random.Random) -> None:
    """What is carried over becomes a file of the output, so a link to a file elsewhere would publish it."""
    name = path / draw.choice(("config.json", A, "tokenizer.json"))
    moved = path.with_name(f"{path.name}-elsewhere")
    shutil.copy(name, moved)
    name.unlink()
    name.symlink_to(moved)


@mutation()
def other_kinds(path: Path, draw: random.Random) -> None:
    name = draw.choice(("adapter_config.json", "adapter_model.safetensors", "quantize_config.json"))
    (path / name).write_text("{}")


@mutation()
def pickles_only(path: Path, draw: random.Random) -> None:
    for name in (A, B, INDEX):
        (path / name).unlink()
    boom = b"cos\nsystem\n(S'touch " + str(path.with_name("executed")).encode() + b"'\ntR."
    name = draw.choice(("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.ckpt"))
    (path / name).write_bytes(boom)


def mutate_job(text: str, draw: random.Random) -> bytes:
    """A job file with something in it changed."""
    if draw.random() < 0.3:
        raw = bytearray(text.encode())
        raw[draw.randrange(len(raw))] = draw.randrange(256)
        return bytes(raw)
    job = json.loads(text)
    kind = draw.randrange(7)
    odd: Any = draw.choice((*ODD_VALUES, *ODD_NAMES))
    if kind == 0:
        job[draw.choice(list(job))] = odd
    elif kind == 1:
        name = draw.choice(ODD_NAMES)
        part = draw.choice(("files", "carried", "texts", "sources"))
        job[part][name] = job[part].pop(next(iter(job[part])))
        for move in job["moves"]:
            move["target"][0] = name
    elif kind == 2:
        keys = ("target", "sources", "axes", "scale", "shift", "cat", "noise", "fill", "name")
        draw.choice(job["moves"])[draw.choice(keys)] = odd
    elif kind == 3:
        draw.choice(job["moves"])["target"][draw.randrange(4)] = odd
    elif kind == 4:
        axes = (["9" * 30, "1"], ["3x1/0", "4"], ["out: 3x2"], ["x", "y"])
        draw.choice(job["moves"])["axes"] = draw.choice(axes)
    elif kind == 5:
        scales = ("9" * 35, "1000000000039", "2^(99999999)", "0", "1/0", "-1")
        draw.choice(job["moves"])["scale"] = draw.choice(scales)
    else:
        job["block_bytes"] = draw.choice((0, 1, -5, 2**60, 1.5, "x"))
    return json.dumps(job).encode("utf-8", "surrogatepass")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, not following links, with its size and time of change."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(Path(root) / name)
            found[str(Path(root) / name)] = (status.st_size, status.st_mtime_ns)
    return found


class HangError(BaseException):
    """A case took too long; no handler of ordinary exceptions may swallow it."""


def outcome(action: Callable[[], None]) -> str:
    """ "done", "refused", or what went wrong."""
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    signal.setitimer(signal.ITIMER_REAL, 15 * PATIENCE)
    try:
        action()
    except mu.MupscaleError as error:
        str(error).encode()  # a message that cannot be printed is no message
        return "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {ascii(str(error))[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "done"


def hang(*_: object) -> None:
    raise HangError


def read_and_run(raw: bytes, out: Path) -> None:
    """A job file, read as a worker reads it, with the output that the worker was given."""
    job = sound_job(raw)
    if job.out == out:
        run_job(job)


def hostile_run(folder: Path, seed: int = 0) -> dict[str, Any]:
    """All cases; what happened, by kind, and the memory it took."""
    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, hang)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS, (used + 2 * MEMORY,) * 2
    )  # a case that fails must not take the machine
    torch.set_num_threads(1)
    draw = random.Random(seed)
    told: dict[str, Any] = {"outcomes": Counter(), "bad": [], "escaped": []}
    names = list(MUTATIONS)
    for case in range(DIRECTORIES + JOBS):
        room = folder / "case"
        path, out = sound(room / "in" / "model"), room / "out" / "wide"
        out.parent.mkdir()
        if case < DIRECTORIES:
            name = names[case % len(names)]
            mutate, must_fail = MUTATIONS[name]
            mutate(path, draw)
            before = snapshot(room / "in")
            found = outcome(lambda path=path, out=out: grow(path, out))  # type: ignore[misc]
        else:
            name, must_fail = "job", False
            directory = read_directory(path)
            files, moves, _ = weight_moves(PLAN, directory)
            job = make_job(
                path, out, files, moves, carried=directory.carried, texts=[Text("config.json", "{}")]
            )
            raw = mutate_job(job.to_json(), draw)
            before = snapshot(room / "in")
            found = outcome(lambda raw=raw, out=out: read_and_run(raw, out))  # type: ignore[misc]
        told["outcomes"][f"{name} {found}"] += 1
        if found not in ("done", "refused") or (must_fail and found == "done"):
            told["bad"].append((case, name, found))
        stray = [p.name for p in (room / "out").iterdir() if p.name not in ("wide", "wide.partial")]
        if stray or snapshot(room / "in") != before or {p.name for p in room.iterdir()} != {"in", "out"}:
            told["escaped"].append((case, name))
        shutil.rmtree(room)
    status = Path("/proc/self/status").read_text()
    told["memory"] = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return told


def in_process(code: str, *arguments: str) -> Any:
    """What a program prints as JSON: signals and memory belong to a whole process."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, env=environment, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_hostile_input_ends_in_a_refusal_or_does_no_harm(tmp_path):
    told = in_process(
        "import json, sys; from pathlib import Path; from tests.files.test_hostile import hostile_run\n"
        "print(json.dumps(hostile_run(Path(sys.argv[1]))))\n",
        str(tmp_path),
    )
    assert told["bad"] == []
    assert told["escaped"] == []
    assert told["memory"] < MEMORY
    outcomes = told["outcomes"]
    assert sum(outcomes.values()) == DIRECTORIES + JOBS
    assert sum(n for name, n in outcomes.items() if name.endswith("refused")) > 1500
    assert outcomes["links refused"] > 10
    assert outcomes["job done"] > 5


def test_a_case_that_computes_or_waits_for_ever_is_ended():
    """Control of the patience above, by processor time and by the clock."""
    found = in_process(
        "import json, signal, time, tests.files.test_hostile as h\n"
        "for number in (signal.SIGPROF, signal.SIGALRM): signal.signal(number, h.hang)\n"
        "h.PATIENCE = 0.2\n"
        "def compute():\n"
        "    while True: pass\n"
        "for_ever = [compute, lambda: time.sleep(1000), lambda: None]\n"
        "print(json.dumps([h.outcome(action) for action in for_ever]))\n"
    )
    assert found == ["HangError: ''", "HangError: ''", "done"]


def test_the_unmutated_directory_is_widened_and_a_mutated_one_is_not(tmp_path):
    """Control: the cases above fail for what was done to them."""
    grow(sound(tmp_path / "model"), tmp_path / "wide")
    assert set(read_directory(tmp_path / "wide").tensors) == {"w", "x", "y"}
    truncated(sound(tmp_path / "other"), random.Random(0))
    refusal(lambda: grow(tmp_path / "other", tmp_path / "never"), "header.other_file_size")
    assert not (tmp_path / "never").exists()


def test_a_pickle_is_never_executed(tmp_path):
    path = sound(tmp_path / "model")
    pickles_only(path, random.Random(0))
    refusal(lambda: read_directory(path), "checkpoint.pickled_weights")
    assert not (tmp_path / "executed").exists()
