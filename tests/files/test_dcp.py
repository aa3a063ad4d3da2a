"""Directories of torch.distributed.checkpoint: read in place, without running a pickle, and refused when they lie."""

import io
import pickle
import shutil
import subprocess
import sys
import warnings
import zipfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import mupscale as mu
from harness.limited import limited
from harness.profiles import examples
from harness.refusals import refusal
from mupscale.files.dcp import metadata as dcp
from mupscale.files.dcp.chunks import chunk_place, read_value
from mupscale.files.dcp.metadata import _gaps, read_dcp
from mupscale.files.dcp.table import Chunk, FileNames, chunked, map_table, write_table
from mupscale.files.elsewhere import DCP_METADATA as METADATA
from mupscale.files.pickles.inert import read_head, read_metadata
from mupscale.files.pickles.opcodes import Record, _no_names, unpickled
from mupscale.files.pickles.torch_file import read_tree
from mupscale.files.pickles.torch_settings import read_settings
from mupscale.jobs.bytes.blocks import Reader, read_rectangle_
from mupscale.plans.ends import identity_plan
from mupscale.sharded.noise import noise_identity
from mupscale.tensors.parts import Rectangle

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def make(n):
    return nn.Sequential(nn.Linear(3, n), nn.BatchNorm1d(n), nn.Tanh(), nn.Linear(n, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base with AdamW state, as `{"model": …, "optim": …}`."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = make(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    path = tmp_path_factory.mktemp("dcp") / "step"
    return saved_as(path, {"model": weights, "optim": state, "step": 2}), model, optimizer


def saved_as(path, tree):
    with warnings.catch_warnings(action="ignore"):
        save_dcp(tree, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def copy(tmp_path, saved):
    """A copy of the base that a test may spoil."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def test_every_tensor_is_found_where_it_lies(saved):
    path, model, _ = saved
    directory = read_dcp(path)
    for name, tensor in model.state_dict().items():
        stored = directory.tensors[f"model.{name}"]
        room = torch.empty_like(tensor)
        with Reader(path) as reader:
            for chunk in stored.chunks:
                place = chunk_place(path, chunk, stored.dtype)
                read_rectangle_(reader, place, [0] * tensor.dim(), room, chunk.start, chunk.shape)
        assert torch.equal(room, tensor)
    assert read_value(path, directory.values["step"]) == 2


def test_a_slice_costs_the_bytes_of_the_slice(tmp_path):
    saved_as(tmp_path / "x", {"w": torch.arange(4000.0).view(1000, 4)})
    stored = read_dcp(tmp_path / "x").tensors["w"]
    room = torch.empty(3, 4)
    with Reader(tmp_path / "x") as reader:
        place = chunk_place(tmp_path / "x", stored.chunks[0], stored.dtype)
        read_rectangle_(reader, place, [500, 0], room, [0, 0], [3, 4])
        assert reader.bytes == 48
    assert torch.equal(room, torch.arange(4000.0).view(1000, 4)[500:503])


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/mupscale-was-run",)


def test_a_metadata_that_would_run_something_is_refused_before_it_does(copy):
    (copy / METADATA).write_bytes(pickle.dumps(Evil()))
    refusal(lambda: read_dcp(copy), "pickle.forbidden_name", where="posix.system")
    refusal(lambda: read_head(pickle.dumps(Evil()), "a chunk"), "pickle.forbidden_name", where="posix.system")


def test_plans_of_who_saved_what_are_inert_and_nothing_is_read_from_them(copy, saved):
    """Control: another class of the same module is refused."""
    metadata = pickle.loads((copy / METADATA).read_bytes())
    item = WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(3))
    metadata.all_local_plans = [SavePlan([item])]
    raw = pickle.dumps(metadata)
    (copy / METADATA).write_bytes(raw)
    assert read_dcp(copy).tensors.keys() == read_dcp(saved[0]).tensors.keys()
    plan = read_metadata(raw, "it").all_local_plans[0]
    assert isinstance(plan, Record)
    assert (plan.kind, plan.items[0].kind) == ("SavePlan", "WriteItem")
    assert plan.items[0].type == WriteItemType.BYTE_IO.value
    metadata.all_local_plans = [LoadItemType.TENSOR]
    refusal(
        lambda: read_metadata(pickle.dumps(metadata), "it"), "pickle.forbidden_name", where="LoadItemType"
    )
    megatron = b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    assert read_metadata(b"\x80\x02c" + megatron + b")\x81.", "it").kind == "MCoreMetadata"


@pytest.mark.parametrize("argument", [b"X\x01\x00\x00\x00a", b"]", b"N"])
def test_the_kind_of_a_write_is_a_number(argument):
    raw = b"\x80\x02ctorch.distributed.checkpoint.planner\nWriteItemType\n(" + argument + b"tR."
    refusal(lambda: read_metadata(raw, "it"), "pickle.unexpected_kind")


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__", "exec"])
def test_builtins_are_not_called_either(name):
    raw = b"\x80\x02c__builtin__\n" + name.encode() + b"\n(X\x01\x00\x00\x00atR."
    refusal(lambda: read_head(raw, "a chunk"), "pickle.forbidden_name", where=name)


def test_paths_stay_inside_the_directory(copy):
    raw, name = (copy / METADATA).read_bytes(), b"__0_0.distcp"
    (copy / METADATA).write_bytes(raw.replace(name, b"../../../../x"[: len(name)]))
    refusal(lambda: read_dcp(copy), "dcp.file_outside_directory", where="../../../../")


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_of_metadata_give_an_error_or_the_same_tensors(copy, seed):
    """300 flips: never an exception of another kind, never a place outside of the file."""
    raw = (copy / METADATA).read_bytes()
    generator = torch.Generator().manual_seed(seed)

    def flip() -> None:
        for _ in range(100):
            at = int(torch.randint(len(raw), (), generator=generator))
            changed = bytearray(raw)
            changed[at] ^= 1 << int(torch.randint(8, (), generator=generator))
            (copy / METADATA).write_bytes(changed)
            with suppress(mu.MupscaleError):
                for stored in read_dcp(copy).tensors.values():
                    for chunk in stored.chunks:
                        place = chunk_place(copy, chunk, stored.dtype)
                        assert 0 <= place.offset <= place.end <= (copy / place.file).stat().st_size

    found = limited(flip, seconds=30)
    assert found.done, found.value


def test_a_file_that_was_cut_short_is_named(copy):
    data = copy / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    refusal(lambda: load(copy), "file.cut_short", where="__0_0.distcp")


def test_a_transposed_tensor_is_refused(tmp_path):
    raw = io.BytesIO()
    torch.save(torch.zeros(3, 2).t(), raw)
    head = zipfile.ZipFile(raw).read("archive/data.pkl")
    assert read_head(head, "x").stride == (1, 2)


def plan():
    return mu.plans.plan_between(make, 4, 8)


def load(path, **options):
    return mu.load_grown_(path, mu.plans.on_meta(lambda: make(8)), plan=plan(), **options)


def test_weights_buffers_and_state_are_those_of_the_live_path(saved):
    path, model, optimizer = saved
    built = mu.plans.on_meta(lambda: make(8))
    wide = mu.Run(built, torch.optim.AdamW(mu.param_groups(built, plan(), torch.optim.AdamW, lr=1e-2)))
    wide = mu.load_grown_(path, wide, plan=plan(), noise=mu.SignalNoise(0.3), seed=3)
    want = mu.upscale(mu.Run(model, optimizer), lambda: make(8), mu.SignalNoise(0.3), seed=3, plan=plan())
    for name, tensor in want.model.state_dict().items():
        assert torch.equal(wide.model.state_dict()[name], tensor), name
    named = dict(want.model.named_parameters())
    for name, parameter in wide.model.named_parameters():
        for key, value in want.optimizers[0].state[named[name]].items():
            assert torch.equal(wide.optimizers[0].state[parameter][key], value), (name, key)
    assert wide.provenance["loaded"]["moments"] == 12


def unit_groups(model):
    return torch.optim.AdamW(mu.param_groups(model, plan(), torch.optim.AdamW, lr=1e-2))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda p: {"plan": mu.plans.plan_between(make, 5, 10), "run": mu.plans.on_meta(lambda: make(10))}, "checkpoint.shape_differs"),
        (lambda p: {"plan": mu.plans.plan_between(make, 4, 12)}, "plan.other_shape"),
        (lambda p: {"source": p / "nothing"}, "directory.nothing_to_load"),
        (lambda p: {"prefix": "optim."}, "checkpoint.tensor_missing"),
        (lambda p: {"stock": torch.optim.AdamW}, "optimizer.not_in_units"),
        (lambda p: {"stock": torch.optim.SGD}, "optimizer.not_in_units"),
        (lambda p: {"sgd": True}, "optimizer.state_of_other_class"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_leaves_nan(saved, change, code):
    changes = change(saved[0])
    model = changes.get("run", mu.plans.on_meta(lambda: make(8)))
    run = mu.Run(model)
    if "stock" in changes:
        run = mu.Run(model, changes["stock"](model.parameters(), lr=1e-2))
    if "sgd" in changes:
        groups = mu.param_groups(model, plan(), torch.optim.SGD, lr=1e-2, momentum=0.9)
        run = mu.Run(model, torch.optim.SGD(groups, momentum=0.9))
    source, chosen = changes.get("source", saved[0]), changes.get("plan", plan())
    refusal(lambda: mu.load_grown_(source, run, plan=chosen, prefix=changes.get("prefix")), code)
    assert all(p.is_meta or p.isnan().all() for p in model.parameters())


def test_other_settings_than_the_sources_are_told(saved):
    built = mu.plans.on_meta(lambda: make(8))
    groups = mu.param_groups(built, plan(), torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.99))
    with pytest.warns(UserWarning, match=r"betas .*\(0.8, 0.99\)"):
        mu.load_grown_(saved[0], mu.Run(built, torch.optim.AdamW(groups, betas=(0.8, 0.99))), plan=plan())
    built = mu.plans.on_meta(lambda: make(8))
    with warnings.catch_warnings(action="error"):
        mu.load_grown_(saved[0], mu.Run(built, unit_groups(built)), plan=plan())


def test_buffers_that_nobody_computed_are_refused_and_init_computes_them(tmp_path, saved):
    class Table(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.inner = make(n)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    grown = replace(mu.plans.plan_between(Table, 4, 8), proof="loss")
    path = saved_as(tmp_path / "table", {"inner": saved[1].state_dict()})
    with torch.device("meta"):
        models = Table(8), Table(8)
    refusal(lambda: mu.load_grown_(path, models[0], plan=grown), "model.buffer_never_computed", where="table")
    init = lambda m: m.get_buffer("table").copy_(torch.arange(3.0))  # noqa: E731
    for model, how in ((models[1], init), (mu.plans.on_meta(lambda: Table(8)), None)):
        wide = mu.load_grown_(path, model, plan=grown, init=how).model
        assert wide.get_buffer("table").tolist() == [0, 1, 2]


def test_two_sets_of_tensors_need_a_prefix(tmp_path, saved):
    weights = saved[1].state_dict()
    two = saved_as(tmp_path / "two", {"model": weights, "ema": {k: v + 1 for k, v in weights.items()}})
    refusal(lambda: load(two), "dcp.several_prefixes_fit", where=["ema.", "model."])
    wide = load(two, prefix="ema.")
    assert torch.equal(wide.model.get_parameter("0.bias")[::2], weights["0.bias"] + 1)


class Unused(nn.Module):
    """A head that no loss reads, so that its optimizer has no state for it."""

    def __init__(self, n):
        super().__init__()
        self.body = make(n)
        self.head = nn.Linear(n, 2)

    def forward(self, x):
        return self.body(x)


def states_of(saved):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return saved[1].state_dict(), get_optimizer_state_dict(saved[1], saved[2])


def load_all(path, **options):
    built = mu.plans.on_meta(lambda: make(8))
    return mu.load_grown_(path, mu.Run(built, unit_groups(built)), plan=plan(), **options)


@pytest.mark.parametrize("nest", ["plain", "state", "train_state", "list", "complex", "named as in the file"])
def test_state_is_found_however_the_checkpoint_is_nested(tmp_path, saved, nest):
    weights, state = states_of(saved)
    prefixed = {"state": {f"model.{n}": s for n, s in state["state"].items()}, "param_groups": []}
    tree: Any = {"model": weights, "optim": state}
    names = [n for n, _ in saved[1].named_parameters()]
    halves = [
        {"state": {n: state["state"][n] for n in part}, "param_groups": []} for part in (names[:3], names[3:])
    ]
    trees = {
        "plain": tree,
        "state": {"state": tree},
        "train_state": {"train_state": tree},
        "list": {"model": weights, "optim": halves},
        "complex": {**tree, "extra": torch.zeros(2, dtype=torch.complex128)},
        "named as in the file": {"model": weights, "optim": prefixed},
    }
    run = load_all(saved_as(tmp_path / "x", trees[nest]))
    assert run.provenance["loaded"]["moments"] == 12
    assert len(run.optimizers[0].state) == 6


def test_state_that_cannot_be_told_is_refused_and_none_is_said(tmp_path, saved):
    weights, state = states_of(saved)
    numbered = saved_as(tmp_path / "numbered", {"model": weights, "optim": saved[2].state_dict()})
    refusal(lambda: load_all(numbered), "dcp.state_of_no_parameter", where="optim.state.0")
    load(numbered)  # nobody asks for its state
    twice = saved_as(tmp_path / "twice", {"model": weights, "a": state, "b": state})
    refusal(lambda: load_all(twice), "dcp.state_in_two_places", where=["a.state", "b.state"])
    with pytest.warns(UserWarning, match="starts without state"):
        load_all(saved_as(tmp_path / "bare", {"model": weights}))


def test_a_second_load_leaves_nothing_of_the_first(tmp_path, saved):
    run = load_all(saved[0])
    with pytest.warns(UserWarning, match="starts without state"):
        run = mu.load_grown_(saved_as(tmp_path / "bare", {"model": saved[1].state_dict()}), run, plan=plan())
    assert not run.optimizers[0].state


def test_a_parameter_that_never_trained_has_no_state_in_the_wide_run_either(tmp_path):
    model = Unused(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    named = {
        "state": {names[i]: s for i, s in state["state"].items()},
        "param_groups": [{**g, "params": names} for g in state["param_groups"]],
    }
    path = saved_as(tmp_path / "x", {"model": model.state_dict(), "optim": named})
    grown = mu.plans.plan_between(Unused, 4, 8)
    built = mu.plans.on_meta(lambda: Unused(8))
    wide = mu.Run(built, torch.optim.AdamW(mu.param_groups(built, grown, torch.optim.AdamW, lr=1e-2)))
    wide = mu.load_grown_(path, wide, plan=grown, prove=False)
    assert len(wide.optimizers[0].state) == len(names) - 2


def test_units_of_another_plan_are_refused(saved):
    built = mu.plans.on_meta(lambda: make(8))
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    attached = mu.step_in_units_(optimizer, identity_plan(built), model=built)
    refusal(
        lambda: mu.load_grown_(saved[0], mu.Run(built, optimizer), plan=plan()),
        "optimizer.not_in_units",
        where="0.5",
    )
    attached.remove()
    mu.step_in_units_(optimizer, plan(), model=built)
    assert (
        mu.load_grown_(saved[0], mu.Run(built, optimizer), plan=plan()).provenance["loaded"]["moments"] == 12
    )


def test_state_made_on_the_meta_device_is_filled_or_refused(tmp_path, saved):
    built = mu.plans.on_meta(lambda: make(8))
    adagrad = torch.optim.Adagrad(mu.param_groups(built, plan(), torch.optim.Adagrad, lr=1e-2))
    bare = saved_as(tmp_path / "bare", {"model": saved[1].state_dict()})
    refusal(lambda: mu.load_grown_(bare, mu.Run(built, adagrad), plan=plan()), "optimizer.state_on_meta")


def test_noise_that_was_resolved_for_something_else_is_refused(saved):
    foreign = mu.diagnostics.resolve_noise(
        {}, mu.MupNoise(0.1), plan=mu.plans.plan_between(Unused, 4, 8), seed=5
    )
    refusal(lambda: load(saved[0], noise=foreign), "noise.unknown_tensor", where="body.0.weight")
    own = mu.diagnostics.resolve_noise({}, mu.MupNoise(0.1), plan=plan(), seed=5)
    refusal(lambda: load(saved[0], noise=own, seed=3), "noise.other_seed")
    assert load(saved[0], noise=own).provenance["seed"] == 5


def test_equal_noise_is_told_alike():
    sizes = ({"x": 0.1, "y": 0.2}, {"y": 0.2, "x": 0.1}, {"x": 0.1, "y": 0.3})
    a, b, other = (noise_identity(mu.MupNoise(size)) for size in sizes)
    assert a == b != other


class Scaled(nn.Module):
    """A table in no checkpoint, behind a wrapper."""

    def __init__(self, n, wrap=False):
        super().__init__()
        inner = nn.Linear(3, n)
        inner.register_buffer("table", torch.arange(3.0), persistent=False)
        self.inner = checkpoint_wrapper(inner) if wrap else inner


def test_buffers_behind_wrappers_are_those_inside(tmp_path):
    path = saved_as(tmp_path / "x", {"model": Scaled(4).state_dict()})
    grown = mu.plans.plan_between(Scaled, 4, 8)
    built = mu.plans.on_meta(lambda: Scaled(8, wrap=True))
    wide: Any = mu.load_grown_(path, built, plan=grown, prove=False).model
    assert torch.equal(wide.inner._checkpoint_wrapped_module.table, torch.arange(3.0))
    with torch.device("meta"):
        empty = Scaled(8, wrap=True)
    again = lambda: mu.load_grown_(path, empty, plan=grown, prove=False)  # noqa: E731
    refusal(again, "model.buffer_never_computed", where="table")


@pytest.mark.parametrize(
    ("chunks", "fits"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], False),
        ([((0, 0), (4, 1)), ((0, 1), (1, 2)), ((1, 1), (3, 2))], True),
        ([((0, 0), (4, 1)), ((0, 1), (2, 2)), ((1, 1), (2, 2))], False),
    ],
)
def test_chunks_that_overlap_or_leave_holes_are_seen(chunks, fits):
    made = chunked("F32", (4, 3), [Chunk(start, shape, "x", 0, 1) for start, shape in chunks], FileNames())
    assert [fault.code for fault in _gaps({"w": made})] == ([] if fits else ["dcp.chunks_do_not_tile"])


def test_pickles_cannot_grow_without_end_or_change_what_they_call():
    nested: Any = "x"
    for _ in range(60):
        nested = [nested, nested]

    class Bomb:
        def __reduce__(self):
            return torch.serialization._get_layout, (nested,)

    refusal(lambda: read_metadata(pickle.dumps(Bomb()), "a bomb"), "pickle.unexpected_kind")
    raw = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x0c\x00\x00\x00__defaults__)sb."
    refusal(lambda: read_head(raw, "a chunk"), "pickle.modifies_no_record")


_LIMITED = """
import resource, sys
from mupscale.errors import MupscaleError
from mupscale.files.pickles.inert import read_metadata
from mupscale.files.pickles.torch_file import read_tree

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
raw = bytes.fromhex(sys.argv[1])
try:
    if sys.argv[2] == "plain":
        import pickle
        found = pickle.loads(raw)
    else:
        found = read_metadata(raw, "it") if sys.argv[2] == "inert" else read_tree(sys.argv[2])
    print("read", found)
except (MupscaleError, MemoryError) as error:
    print(getattr(error, "code", type(error).__name__))
"""


def _limited(raw: bytes, how: str) -> str:
    """What a process with 256 MiB to spare says of a pickle."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, raw.hex(), how], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def archived(folder, raw):
    """A file of `torch.save` with this pickle in it."""
    with zipfile.ZipFile(folder / "optimizer.pt", "w") as archive:
        for name, data in (("data.pkl", raw), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", data)
    return folder / "optimizer.pt"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to set a memory limit")
def test_nine_bytes_cannot_ask_for_gigabytes(tmp_path):
    bomb = b"\x80\x02]r\x00\x00\x00\x08."  # an empty list, put at index 2^27 of the memo
    assert len(bomb) == 9
    assert _limited(bomb, "inert") == "pickle.memo_index_too_large"
    assert _limited(bomb, "plain") == "MemoryError", "control: unpickled as it is, it takes them"
    assert _limited(b"\x80\x02]r\x03\x00\x00\x00.", "inert") == "read []", (
        "control: an index that it can have"
    )
    assert _limited(b"", str(archived(tmp_path, bomb))) == "pickle.memo_index_too_large"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_plain_values_are_read_as_pickle_reads_them(protocol):
    shared = [1, 2.5, None, True]
    tree = {
        "a": shared,
        "b": shared,
        "ü": ("x" * 300, b"y" * 70_000 if protocol > 2 else "y", 2**3000, -7),
        "c": [[i] for i in range(300)],
    }
    raw = pickle.dumps(tree, protocol=protocol)
    found = unpickled(raw, _no_names, 1000)
    assert found == tree
    assert found["a"] is found["b"]
    for cut in range(0, len(raw), 997):
        error = refusal(partial(unpickled, raw[:cut], _no_names, 1000))
        assert error.code in ("pickle.ends_too_early", "pickle.argument_incomplete")
    refusal(partial(unpickled, raw, _no_names, 100), "pickle.too_many_records")


@pytest.mark.parametrize(
    ("raw", "code"),
    [(b"]q\xff.", "memo_index_too_large"), (b"]p99999999\n.", "unknown_opcode"), (b"\xff.", "unknown_opcode"),
     (b"\x8e" + b"\xff" * 8 + b".", "argument_too_long"), (b"h\x05.", "memo_never_put"), (b"\x86.", "ends_too_early")],
)  # fmt: skip
def test_other_ways_to_a_large_memo_are_refused(raw, code):
    refusal(lambda: read_metadata(raw, "it"), f"pickle.{code}")


def doubled(depth: int, first: bytes, pair: bytes) -> bytes:
    """Opcodes of a container that holds its predecessor twice, `depth` times over; the last is at index depth - 1."""
    made = first + b"q\x00"
    for level in range(1, depth):
        made += pair.replace(b"?", b"h" + bytes([level - 1])) + b"q" + bytes([level])
    return made


TUPLES, LISTS = doubled(36, b")", b"??\x86"), doubled(36, b"]", b"](??e")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x80\x02" + TUPLES + b"}h\x23K\x01s.", "key_not_plain"),
        (b"\x80\x02" + LISTS + b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81(ctorch\nfloat32\nh\x23tb.",
         "tensor_without_properties"),
        (b"\x80\x02" + b"]" * 2_000_000 + b".", "too_many_records"),
    ],
    ids=["hash", "layout", "many lists"],
)  # fmt: skip
def test_small_pickles_cannot_ask_for_endless_work(raw, code):
    refusal(lambda: read_metadata(raw, "it"), f"pickle.{code}")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x80\x02" + TUPLES + b"}h\x23K\x01s.", "key_not_plain"),
        (b"\x80\x02" + LISTS + b"}X\x05\x00\x00\x00stateh\x23s.", "too_large_when_shared"),
        (b"\x80\x02]q\x00h\x00a.", "nested_too_deeply"),
        (b"\x80\x02" + b"](" * 60 + b"e" * 60 + b".", "nested_too_deeply"),
    ],
    ids=["hash", "walk", "a list in itself", "depth"],
)
def test_the_pickle_of_an_optimizer_is_bounded_too(tmp_path, raw, code):
    refusal(lambda: read_tree(archived(tmp_path, raw)), f"pickle.{code}", where="optimizer.pt")


def test_metadata_is_no_longer_than_its_files_explain(copy):
    with open(copy / METADATA, "ab") as file:
        file.truncate(40_000_000)
    refusal(lambda: read_dcp(copy), "file.too_long", where="40000000")


def test_a_table_gives_another_process_the_same_directory(tmp_path):
    content = {"a": torch.arange(12.0).view(4, 3), "n": torch.tensor(3), "lr": 0.1}
    want = read_dcp(saved_as(tmp_path / "x", content))
    with open(tmp_path / "table", "wb") as file:
        write_table(want, file)
    found = map_table(tmp_path / "table", tmp_path / "x")
    assert (found.path, found.digest, found.values) == (want.path, want.digest, want.values)
    assert found.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape, other.chunks) == (tensor.dtype, tensor.shape, tensor.chunks)
    with open(tmp_path / "table", "wb") as file:
        write_table(replace(want, tensors={}), file)
    assert map_table(tmp_path / "table", tmp_path / "x").tensors == {}


@examples(100)
@given(st.data())
def test_looking_up_chunks_finds_those_that_a_comparison_of_all_finds(data):
    dims = data.draw(st.integers(0, 3))
    cuts = [sorted({0, *data.draw(st.lists(st.integers(1, 9), max_size=3)), 10}) for _ in range(dims)]
    chunks = [
        Chunk(tuple(a for a, _ in corner), tuple(b - a for a, b in corner), f"f{number % 3}", number, 1)
        for number, corner in enumerate(product(*(list(pairwise(cut)) for cut in cuts)))
    ]
    tensor = chunked("F32", (10,) * dims, chunks, FileNames(["other"]))
    start = tuple(data.draw(st.integers(0, 9)) for _ in range(dims))
    shape = tuple(data.draw(st.integers(1, 10 - at)) for at in start)
    wanted = Rectangle(start, shape)
    want = [chunk for chunk in chunks if Rectangle(chunk.start, chunk.shape).meet(wanted).numel]
    assert tensor.chunks == chunks
    assert tensor.meeting(start, shape) == want


def archive(path, pickled, files=0, packed=False):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as made:
        for name, raw in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3")):
            made.writestr(f"a/{name}", raw)
        for number in range(files):
            made.writestr(f"a/{number}", b"")
    return path


def _refused(read: Any, path: Any) -> int:
    refusal(lambda: read(path), "pickle.too_many_records")
    return 0


@pytest.mark.parametrize("read", [read_settings, read_tree])
def test_memo_entries_and_names_count_and_nothing_is_unpacked(tmp_path, read):
    sound = pickle.dumps({str(n): [n] for n in range(5000)}, 2)
    assert len(read(archive(tmp_path / "sound", sound))) == 5000
    bombs = {
        "memo": b"}" + b"\x94" * 900_000,
        "one name": b"](" + b"ca\nb\n" * 400_000 + b"e",
        "names": b"](" + b"".join(b"ca\nb%d\n" % n for n in range(50_000)) + b"e",
        "many values": b"(" + b"N" * 4_000_000 + b"t",
    }
    for name, raw in bombs.items():
        path = archive(tmp_path / name, b"\x80\x02" + raw + b".", files=1000)
        found = limited(partial(_refused, read, path))
        assert found.done, (name, found)
    packed = archive(tmp_path / "packed", sound, packed=True)
    refusal(lambda: read(packed), "archive.is_compressed")


def test_a_tensor_of_optimizer_state_has_the_strides_and_the_bytes_that_it_names(tmp_path):
    torch.save({"a": torch.zeros(7, 5)}, tmp_path / "sound")

    def changed(old, new):
        with zipfile.ZipFile(tmp_path / "sound") as sound, zipfile.ZipFile(tmp_path / "odd", "w") as made:
            for name in sound.namelist():
                raw = sound.read(name)
                assert not name.endswith(".pkl") or old in raw
                made.writestr(name, raw.replace(old, new) if name.endswith(".pkl") else raw)
        return tmp_path / "odd"

    assert read_tree(changed(b"K\x23", b"K\x23"))["a"].shape == (7, 5)
    refusal(
        lambda: read_tree(changed(b"K\x05K\x01\x86", b"J\xfb\xff\xff\xffK\x01\x86")), "pickle.negative_size"
    )
    refusal(lambda: read_tree(changed(b"K\x23", b"K\x24")), "archive.other_storage_size")


def test_irregular_chunks_of_all_tensors_are_compared_within_one_budget(monkeypatch):
    bricks = [
        c
        for r in range(0, 8, 2)
        for c in [((r, 0), (1, 1)), ((r, 1), (1, 2)), ((r + 1, 0), (1, 2)), ((r + 1, 2), (1, 1))]
    ]
    made = chunked("F32", (8, 3), [Chunk(start, shape, "x", 0, 1) for start, shape in bricks], FileNames())
    assert not list(_gaps({str(n): made for n in range(9)}))
    monkeypatch.setattr(dcp, "_MOST_COMPARED", 4 * 2 * len(bricks) ** 2)
    assert [fault.where for fault in _gaps({str(n): made for n in range(5)})] == ["4"]


def test_links_out_of_a_directory_are_not_followed(tmp_path):
    save_dcp({"w": torch.ones(3)}, checkpoint_id=tmp_path / "sound")
    shutil.move(tmp_path / "sound" / "__0_0.distcp", tmp_path / "elsewhere")
    (tmp_path / "sound" / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    refusal(lambda: read_dcp(tmp_path / "sound"), "directory.link_leads_outside", where="__0_0.distcp")
    shutil.move(tmp_path / "elsewhere", tmp_path / "sound" / "inside")
    (tmp_path / "sound" / "__0_0.distcp").unlink()
    (tmp_path / "sound" / "__0_0.distcp").symlink_to("inside")
    assert read_dcp(tmp_path / "sound").tensors["w"].shape == (3,)
