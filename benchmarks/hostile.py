"""Hostile inputs are refused, or read as what they are, soon and in little memory.

Files of every kind that is read are changed at random, and some are bombs: small files that ask for endless work or
memory. Each is read in a process of its own that may take 2 CPU seconds and 200 MB above the start of the call. Directories go
through `mu.same` as well, as both of two checkpoints, in twice the time.

    python benchmarks/hostile.py [--inputs 2500] [--seed 0] [--quick] [--list]

refused         inputs that ended in a `MupscaleError`; the others were read
hangs, memory   inputs that went beyond the limits
executed        inputs after which a file existed that only running a pickle or a checkpoint's code could have made
accepted_wrong  inputs that were read as something else than they hold. The oracles: what is written equals the kernel
                applied to what safetensors' own reader loads; a tensor of DCP or of an optimizer has the bytes of
                the unchanged file; a plan or recipe that was read is written as the same JSON
leaked          URLs whose password or signature was printed by the command that refused them

The last line counts; the exit code is 1 when one of the last five, or any other exception, is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import mupscale as mu
from harness.limited import CPU_SECONDS, HANG, MEMORY, limited
from harness.oracle import expand_slowly
from harness.program import Outcome, option, run
from mupscale.checkpoints.shards import weight_moves
from mupscale.cli.main import main as command
from mupscale.errors import MupscaleError
from mupscale.families.models import config_from as from_config
from mupscale.files.dcp.chunks import chunk_place, read_value
from mupscale.files.dcp.metadata import read_dcp
from mupscale.files.directory import read_directory
from mupscale.files.elsewhere import DCP_METADATA, MEGATRON_CONFIG, MEGATRON_FORMAT
from mupscale.files.pickles.torch_file import read_tensor, read_tree
from mupscale.files.pickles.torch_settings import read_settings
from mupscale.files.places import Place
from mupscale.jobs.digests import make_job
from mupscale.jobs.job import Text
from mupscale.jobs.worker import run_job
from mupscale.storage import remote
from mupscale.training.recipe import Recipe, TensorGrowth

REFUSALS = ("MupscaleError", *(kind.__name__ for kind in mu.MupscaleError.__subclasses__()))
WRONG, LEAKED, SECRET = "accepted wrong", "leaked", "HUNTER2SECRET"
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NAMES = ("w", "x")
AXES = (mu.rules.Axis.parse("out: 3x2"), mu.rules.Axis.parse("in: 4x2"))
PLAN = mu.Plan({name: mu.plans.TensorPlan((name,), AXES) for name in NAMES})
RECIPE = Recipe(
    "torch.optim.AdamW", {"lr": 1e-3, "betas": [0.9, 0.99]}, 0.1, k=2, tensors={"w": TensorGrowth((3, 4), ("out x2", "-"))}
)  # fmt: skip
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, "3", "", [], {}, [[]], 10**19, -(10**18), 2**63, 2**64 - 1, [1] * 300, "<script>"),
    *("U64", "F8_E4M3", "../x", "/etc/passwd", "a\0b", "in: 99999999999999999999x2", "7" * 60, "2^(99999999)", [2**62, 2]),
)  # fmt: skip
Input = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Kind:
    """A kind of file: how a sound one is changed, and how it is read."""

    change: Input
    read: Callable[[Path], str]


def flipped(raw: bytes, draw: random.Random, spared: range = range(0)) -> bytes:
    """A few bits flipped, bytes cut off or added; nothing in the range that is spared."""
    changed = bytearray(raw)
    how = draw.randrange(6)
    if how == 0:
        return bytes(changed[: draw.randrange(len(changed))])
    if how == 1:
        return bytes(changed) + bytes(draw.choice((1, 8, 4096)))
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(changed))
        if at not in spared:
            changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def odd(tree: Any, draw: random.Random) -> Any:
    """A tree of JSON with one of its values replaced, doubled under another name, or removed."""
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        key = draw.choice(list(tree))
        how = draw.randrange(8)
        if how == 0:
            return {k: v for k, v in tree.items() if k != key}
        if how == 1:
            return {**tree, str(draw.choice(ODD)): tree[key]}
        return {**tree, key: odd(tree[key], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.7:
        at = draw.randrange(len(tree))
        return [*tree[:at], odd(tree[at], draw), *tree[at + 1 :]]
    return draw.choice(ODD)


def odd_text(tree: Any, draw: random.Random) -> bytes:
    text = json.dumps(odd(tree, draw)).encode()
    return flipped(text, draw) if draw.random() < 0.2 else text


class Inputs:
    """Sound files of every kind, and what is done to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(3, 4) for name in NAMES}
        self.base = folder / "sound"
        self.base.mkdir()
        (self.base / CONFIG).write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
        (self.base / "tokenizer.json").write_text("{}")
        save_file(self.tensors, self.base / SINGLE, metadata={"format": "pt"})
        self.dcp = folder / "dcp"
        with warnings.catch_warnings(action="ignore"):
            save_dcp({"model": dict(self.tensors), "lr": 0.5}, checkpoint_id=self.dcp)
        self.optimizer = self._optimizer()
        self.stored = {
            key: (self.dcp / place.file).read_bytes()[place.offset : place.end]
            for key, place in self._places()
        }
        tree = read_tree(folder / "optimizer.pt")
        self.payload = [place for state in tree["state"].values() for place in state.values()]
        self.states = dict(_tensors_of(folder, tree))
        self.sentinel = folder / "executed"
        self.kinds = {
            "header": Kind(self.header, self.grow),
            "index": Kind(self.index, self.grow),
            "config": Kind(self.config, self.grow),
            "links": Kind(self.links, self.grow),
            ".metadata": Kind(self.metadata, self.read_dcp),
            "chunks": Kind(self.chunk, self.read_dcp),
            "optimizer.pt": Kind(self.state, self.read_state),
            "plan": Kind(lambda path, draw: _put(path, odd_text(PLAN.as_json(), draw)), _read_plan),
            "recipe": Kind(lambda path, draw: _put(path, odd_text(RECIPE.as_json(), draw)), _read_recipe),
        }

    def _optimizer(self) -> bytes:
        weights = [torch.nn.Parameter(tensor.clone()) for tensor in self.tensors.values()]
        optimizer = torch.optim.AdamW(weights)
        sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]
        optimizer.step()
        torch.save(optimizer.state_dict(), self.folder / "optimizer.pt")
        return (self.folder / "optimizer.pt").read_bytes()

    def _places(self) -> Iterator[tuple[str, Place]]:
        for name, tensor in read_dcp(self.dcp).tensors.items():
            yield name, chunk_place(self.dcp, tensor.chunks[0], tensor.dtype)

    # What is changed

    def header(self, path: Path, draw: random.Random) -> None:
        shutil.copytree(self.base, path)
        raw = (path / SINGLE).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        data = raw[8 + length :]
        how = draw.randrange(5)
        if how == 0:
            text = flipped(raw[: 8 + length], draw)
            (path / SINGLE).write_bytes(text + data)
            return
        if how == 1:
            lie = draw.choice((0, 1, 7, length + 8, 2**20, 2**31, 2**63, 2**64 - 1, 10**8 + 8))
            (path / SINGLE).write_bytes(lie.to_bytes(8, "little") + raw[8:])
            return
        if how == 2:
            data = draw.choice((data[: draw.randrange(len(data))], data + bytes(8)))
        entries = json.loads(raw[8 : 8 + length])
        text = json.dumps(odd(entries, draw)).encode()
        text += b" " * (-len(text) % 8)
        (path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)

    def index(self, path: Path, draw: random.Random) -> None:
        shutil.copytree(self.base, path)
        (path / SINGLE).rename(path / "a.safetensors")
        names = (
            "../a.safetensors",
            "/dev/zero",
            "a.safetensors/",
            "loop.safetensors",
            "pipe.safetensors",
            "a\0",
            "x" * 300,
        )
        (path / "loop.safetensors").symlink_to("loop.safetensors")
        os.mkfifo(path / "pipe.safetensors")
        where: dict[str, Any] = dict.fromkeys(NAMES, "a.safetensors")
        if draw.random() < 0.5:
            where[draw.choice(NAMES)] = draw.choice(names)
        _put(path / INDEX, odd_text({"metadata": {"total_size": 96}, "weight_map": where}, draw))

    def config(self, path: Path, draw: random.Random) -> None:
        shutil.copytree(self.base, path)
        code = {"AutoModel": "evil.Model"} if draw.random() < 0.3 else {}
        (path / "evil.py").write_text(f"open({str(self.sentinel)!r}, 'w')\n")
        _put(
            path / CONFIG,
            odd_text({"model_type": "llama", "hidden_size": 4, "auto_map": code, "x": [1, {}]}, draw),
        )

    def links(self, path: Path, draw: random.Random) -> None:
        shutil.copytree(self.base, path)
        secret = self.folder / "secret.txt"
        secret.write_text("a secret")
        name = draw.choice((CONFIG, SINGLE, "tokenizer.json", "notes.txt", "optimizer.pt", "LICENSE"))
        targets = (
            secret,
            self.base / SINGLE,
            Path("/dev/zero"),
            Path(name),
            Path(".."),
            Path("../secret.txt"),
            Path("/etc/passwd"),
        )
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(draw.choice(targets))

    def metadata(self, path: Path, draw: random.Random) -> None:
        shutil.copytree(self.dcp, path)
        _put(path / DCP_METADATA, flipped((self.dcp / DCP_METADATA).read_bytes(), draw))

    def chunk(self, path: Path, draw: random.Random) -> None:
        shutil.copytree(self.dcp, path)
        _, place = draw.choice(list(self._places()))
        raw = (path / place.file).read_bytes()
        chosen = draw.choice([c for t in read_dcp(self.dcp).tensors.values() for c in t.chunks])
        end = chosen.offset + chosen.length
        spared = next(range(p.offset, p.end) for _, p in self._places() if chosen.offset <= p.offset < end)
        inside = range(spared.start - chosen.offset, spared.stop - chosen.offset)
        part = flipped(raw[chosen.offset : end], draw, inside)
        _put(
            path / place.file,
            raw[: chosen.offset] + part[: chosen.length].ljust(chosen.length, b"\0") + raw[end:],
        )

    def state(self, path: Path, draw: random.Random) -> None:
        path.mkdir()
        raw = self.optimizer
        at = raw.index(b"\x80\x02")
        if draw.random() < 0.5:
            end = raw.index(b"PK", at)
            part = flipped(raw[at:end], draw)[: end - at]
            _put(path / "optimizer.pt", raw[:at] + part.ljust(end - at, b"\0") + raw[end:])
            return
        changed = bytearray(flipped(raw, draw))
        for place in self.payload:
            changed[place.offset : place.end] = raw[place.offset : place.end]
        _put(path / "optimizer.pt", bytes(changed))

    # How it is read

    def grow(self, path: Path) -> str:
        directory = read_directory(path)
        files, moves, index = weight_moves(PLAN, directory)
        texts = [Text(CONFIG, "{}"), *([Text(INDEX, index)] if index is not None else [])]
        out = path.with_name(f"{path.name}-wide")
        run_job(make_job(path, out, files, moves, carried=directory.carried, texts=texts))
        there = {n: t for file in directory.weights for n, t in load_file(path / file).items()}
        made = {n: t for file in files for n, t in load_file(out / file.name).items()}
        for name in NAMES:
            want = expand_slowly(there[name], PLAN[name].axes, PLAN[name].change.s)
            if not torch.equal(made[name].view(torch.uint8), want.to(made[name].dtype).view(torch.uint8)):
                return WRONG
        secret = any((out / name).read_bytes() == b"a secret" for name in directory.carried)
        return WRONG if secret else "read"

    def read_dcp(self, path: Path) -> str:
        directory = read_dcp(path)
        for name, tensor in directory.tensors.items():
            for chunk in tensor.chunks:
                place = chunk_place(path, chunk, tensor.dtype)
                found = (path / place.file).read_bytes()[place.offset : place.end]
                if name in self.stored and found != self.stored[name]:
                    return WRONG
        for where in directory.values.values():
            read_value(path, where)
        return "read"

    def read_state(self, path: Path) -> str:
        found = dict(_tensors_of(path, read_tree(path / "optimizer.pt")))
        same = all(found[key] == self.states[key] for key in found if key in self.states)
        return "read" if same else WRONG

    def compare(self, path: Path) -> str:
        """What `mu.same` says of a checkpoint and itself, whatever that is; files that are part of one get the rest of it."""
        if (path / "optimizer.pt").exists() and not (path / CONFIG).exists():
            for name in (CONFIG, SINGLE):
                shutil.copy(self.base / name, path)
        if (path / "common.pt").exists():
            (path / MEGATRON_CONFIG).write_text(json.dumps({MEGATRON_FORMAT: "torch_dist"}))
        mu.same(path, path, profile="relaxed")
        return "read"


def _tensors_of(folder: Path, tree: Any, where: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The entries of every tensor of a tree, by where it is."""
    if isinstance(tree, Place):
        tensor = read_tensor(folder, tree)
        yield f"{where} {tree.dtype} {tree.shape}", tensor.reshape(-1).tolist()
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors_of(folder, value, f"{where}[{key!r}]")


def _put(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)


def _written(raw: bytes) -> Input:
    return lambda path, _: _put(path, raw)


def _read_plan(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    told, given = mu.Plan.from_json(text).as_json(), json.loads(text)
    return "read" if all(same(told[key], given[key]) for key in told if key in given) else WRONG


def _read_recipe(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    told = json.loads(Recipe.from_json(text).to_json())
    return "read" if all(same(told[key], value) for key, value in json.loads(text).items()) else WRONG


def same(a: Any, b: Any) -> bool:
    """Whether two values of JSON are the same; 1 and 1.0 are, true and 1 are not."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if {type(a), type(b)} == {int, float}:
        return float(a) == float(b)
    return type(a) is type(b) and bool(a == b)


class Evil:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def doubled(depth: int, first: bytes, pair: bytes) -> bytes:
    """Opcodes of a container that holds its predecessor twice, `depth` times over; the last is at index depth - 1."""
    made = first + b"q\x00"
    for level in range(1, depth):
        made += pair.replace(b"?", b"h" + bytes([level - 1])) + b"q" + bytes([level])
    return made


def bombs(inputs: Inputs) -> Iterator[tuple[str, Input, Callable[[Path], str]]]:
    """Small files that ask for endless work or memory, or that would run something, by name."""
    tuples, lists = doubled(36, b")", b"??\x86"), doubled(36, b"]", b"](??e")

    def text(value: bytes) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value

    module = b"ctorch.distributed.checkpoint.metadata\n"
    index = module + b"MetadataIndex\n)\x81}(" + text(b"fqn") + text(b"w") + text(b"offset") + b"Nub"
    info = (
        b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(" + text(b"relative_path") + b"h\x23"
        + text(b"offset") + b"K\x00" + text(b"length") + b"K\x01ub"
    )  # fmt: skip
    value = module + b"BytesStorageMetadata\n)\x81}b"
    pickles = {
        "hash": b"\x80\x02" + tuples + b"}h\x23K\x01s.",
        "layout": b"\x80\x02" + lists + module + b"TensorProperties\n)\x81(ctorch\nfloat32\nh\x23tb.",
        "relative_path": b"\x80\x02" + lists + module + b"Metadata\n)\x81}(" + text(b"storage_data") + b"}" + index + info
        + b"s" + text(b"state_dict_metadata") + b"}" + text(b"w") + value + b"sub.",
        "memo": b"\x80\x02]r\x00\x00\x00\x08.",
        "memo 2^32": b"\x80\x02]r\xff\xff\xff\xff.",
        "lists": b"\x80\x02" + b"]" * 40_000_000 + b".",
        "walk": b"\x80\x02" + lists + b"}" + text(b"state") + b"h\x23s.",
        "itself": b"\x80\x02]q\x00h\x00a.",
        "deep": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
        "none": b"\x80\x02(" + b"N" * 900_000 + b"l.",
        "long": b"\x80\x02\x8b" + (800_000).to_bytes(4, "little") + b"\x7f" * 800_000 + b".",
        "run": pickle.dumps(Evil(inputs.sentinel), 2),
        "run 4": pickle.dumps(Evil(inputs.sentinel), 4),
    }  # fmt: skip
    for name, raw in pickles.items():

        def metadata(path: Path, _: random.Random, raw: bytes = raw) -> None:
            shutil.copytree(inputs.dcp, path)
            _put(path / DCP_METADATA, raw)

        def optimizer(path: Path, _: random.Random, raw: bytes = raw) -> None:
            path.mkdir()
            with zipfile.ZipFile(path / "optimizer.pt", "w") as archive:
                for part, data in (("data.pkl", raw), ("version", b"3\n"), ("byteorder", b"little")):
                    archive.writestr(f"archive/{part}", data)

        yield f".metadata {name}", metadata, inputs.read_dcp
        yield f"optimizer.pt {name}", optimizer, inputs.read_state
    yield from settings_bombs()
    yield from planned()
    yield from shown()
    deep = b"[" * 100_000
    numbers = json.dumps({**PLAN.as_json(), "edits": [["a", 1.0, "1000000000039*2^(999999999)"]]}).encode()
    for name, raw in (("deep", deep), ("numbers", numbers)):

        def put(path: Path, _: random.Random, raw: bytes = raw) -> None:
            _put(path, raw)

        yield f"plan {name}", put, _read_plan
        yield f"recipe {name}", put, _read_recipe


def settings_bombs() -> Iterator[tuple[str, Input, Callable[[Path], str]]]:
    """Small files of settings, and a `.metadata`, that ask for memo entries, classes, values or comparisons without end."""
    names = b"](" + b"ca\nb\n" * 200_000 + b"e"
    several = b"](" + b"".join(b"ca\nb%d\n" % number for number in range(90_000)) + b"e"
    for name, raw, files, packed in (
        ("memo", b"}" + b"\x94" * (4096 * 20_000), 20_000, True),
        ("memo stored", b"}" + b"\x94" * 1_000_000, 0, False),
        ("one name", names, 0, True),
        ("names", several, 0, False),
    ):

        def settings(
            path: Path, _: random.Random, raw: bytes = raw, files: int = files, packed: bool = packed
        ) -> None:
            path.mkdir()
            kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            with zipfile.ZipFile(path / "common.pt", "w", kind) as archive:
                for part, data in (
                    ("data.pkl", b"\x80\x02" + raw + b"."),
                    ("version", b"3\n"),
                    ("byteorder", b"little"),
                ):
                    archive.writestr(f"a/{part}", data)
                for number in range(files):
                    archive.writestr(f"a/{number}", b"")

        yield (
            f"settings {name}",
            settings,
            lambda path: "read" if read_settings(path / "common.pt") else WRONG,
        )

    for name, raw in (("memo", b"\x80\x02}" + b"\x94" * (32 << 20) + b"."), ("bricks", bricks(25))):

        def metadata(path: Path, _: random.Random, raw: bytes = raw) -> None:
            path.mkdir()
            _put(path / DCP_METADATA, raw)
            with open(path / "__0_0.distcp", "wb") as file:
                file.truncate(40 << 20)  # a hole, which makes room for as many bytes of `.metadata`

        yield f".metadata large {name}", metadata, lambda path: "read" if read_dcp(path) else WRONG


def bricks(tensors: int) -> bytes:
    """The `.metadata` of tensors in 512 chunks each that are no grid."""
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for number in range(tensors):
        chunks = []
        for row in range(256):
            for at, width in ((0, 1 + row % 2), (1 + row % 2, 2 - row % 2)):
                start = torch.Size([row, at])
                chunks.append(dcp_metadata.ChunkStorageMetadata(start, torch.Size([1, width])))
                stored[dcp_metadata.MetadataIndex(f"{number}", start)] = filesystem._StorageInfo(
                    "__0_0.distcp", 0, 1
                )
        described[f"{number}"] = dcp_metadata.TensorStorageMetadata(
            dcp_metadata.TensorProperties(torch.float32), torch.Size([256, 3]), chunks
        )
    return pickle.dumps(dcp_metadata.Metadata(described, None, stored))


def planned() -> Iterator[tuple[str, Input, Callable[[Path], str]]]:
    """Configurations with numbers of layers that no model has."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    from_config({"model_type": "llama", "num_hidden_layers": 1, **sizes})  # imports what planning needs
    for layers in (-1, 0, 10**6, 10**18):

        def read(path: Path) -> str:
            from_config(json.loads(path.read_text()))
            return WRONG

        def put(path: Path, _: random.Random, layers: int = layers) -> None:
            _put(path, json.dumps({"model_type": "llama", "num_hidden_layers": layers, **sizes}).encode())

        yield f"config {layers} layers", put, read


def shown() -> Iterator[tuple[str, Input, Callable[[Path], str]]]:
    """URLs with secrets, refused: the message is the outcome that may not have them."""
    for url in (
        f"http://me:{SECRET}@127.0.0.1:1/base", f"http://127.0.0.1:1/base?X-Amz-Signature={SECRET}",
        f"s3://KEY:{SECRET}@bucket/base", f"postgresql://me:{SECRET}@127.0.0.1:1/db",
    ):  # fmt: skip

        def read(path: Path) -> str:
            setattr(remote, "PAUSES", ())  # one try is enough  # noqa: B010
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                for words in (["plan", path.read_text(), "-k", "2"], ["report", path.read_text()]):
                    command(words)
            return (
                LEAKED
                if SECRET in said.getvalue()
                else "MupscaleError"
                if "mupscale:" in said.getvalue()
                else WRONG
            )

        yield f"url {url.partition(':')[0]}", _written(url.encode()), read


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    count = chosen.inputs // 10 if chosen.quick else chosen.inputs
    folder = Path(tempfile.mkdtemp())
    tally: Counter[str] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    worst, failed = (0.0, 0), list[str]()
    try:
        inputs = Inputs(folder)
        cases = [(name, kind.change, kind.read) for name, kind in inputs.kinds.items()]
        todo = [*bombs(inputs), *(cases[number % len(cases)] for number in range(count))]
        shutil.copytree(inputs.base, folder / "compared")
        shutil.copy(folder / "optimizer.pt", folder / "compared")
        inputs.compare(folder / "compared")  # imports what comparing needs
        for number, name, read, path in made(todo, folder / "case", chosen.seed, inputs.compare):
            found = limited(quietly(read, path), CPU_SECONDS * (2 if read == inputs.compare else 1))
            refused = str(found.value).startswith(REFUSALS)
            end = "refused" if refused else str(found.value)
            worst = (max(worst[0], found.seconds), max(worst[1], found.memory))
            tally["inputs"] += 1
            tally["refused"] += refused
            tally["hangs"] += end == HANG
            tally["memory"] += end == MEMORY
            tally["wrong"] += end == WRONG
            tally["leaked"] += end == LEAKED
            tally["other"] += end not in ("refused", "read", HANG, MEMORY, WRONG, LEAKED)
            if inputs.sentinel.exists():
                tally["executed"] += 1
                failed.append(f"input {number}, {name}: something was executed")
            inputs.sentinel.unlink(missing_ok=True)
            if end not in ("refused", "read"):
                failed.append(f"input {number}, {name}: {end}")
            ends[name, end] += 1
        # Control: a pickle that is run makes the file, and a process that computes for ever or takes memory is seen.
        controls = [
            limited(lambda: pickle.loads(pickle.dumps(Evil(inputs.sentinel)))).done and inputs.sentinel.exists(),
            limited(lambda: pickle.loads(b"\x80\x02" + doubled(36, b")", b"??\x86") + b"}h\x23K\x01s.")).value == HANG,
            limited(lambda: len(bytearray(300 << 20))).value == MEMORY,
            SECRET in str(MupscaleError(f"http://me:{SECRET}@host/base")),  # what hides it is not the error
        ]  # fmt: skip
    finally:
        shutil.rmtree(folder)
    if chosen.list:
        for (name, end), times in sorted(ends.items()):
            print(f"{times:6} {name}: {end}")
    print(
        f"slowest {worst[0]:.2f} CPU s, largest {worst[1] / 1e6:.0f} MB, cpu {sum(os.times()[:4]):.0f} s, controls={sum(controls)}/{len(controls)}"
    )
    if not all(controls):
        failed.append(f"controls were seen: {controls}")
    return Outcome(
        f"inputs={tally['inputs']} refused={tally['refused']} hangs={tally['hangs']} memory={tally['memory']} "
        f"executed={tally['executed']} accepted_wrong={tally['wrong']} leaked={tally['leaked']} other={tally['other']}",
        failed,
    )


def made(
    todo: list[tuple[str, Input, Callable[[Path], str]]],
    path: Path,
    seed: int,
    compare: Callable[[Path], str],
) -> Iterator[tuple[int, str, Callable[[Path], str], Path]]:
    """Every input in turn, with what reads it: its own reader, and `mu.same` where it is a directory."""
    for number, (name, change, read) in enumerate(todo):
        change(path, random.Random(f"{seed} {number}"))
        yield number, name, read, path
        if path.is_dir():
            yield number, f"{name}, compared", compare, path
        for left in (path, Path(f"{path}-wide"), Path(f"{path}-wide.partial")):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def quietly(read: Callable[[Path], str], path: Path) -> Callable[[], str]:
    """The call without the warnings of torch about odd files."""

    def call() -> str:
        with warnings.catch_warnings(action="ignore"):
            return read(path)

    return call


if __name__ == "__main__":
    options = (
        option("--inputs", type=int, default=2500),
        option("--seed", type=int, default=0),
        option("--quick", action="store_true", help="a tenth of the inputs, all bombs"),
        option("--list", action="store_true", help="print how the inputs of each kind ended"),
    )
    sys.exit(run(measure, *options, doc=__doc__))
