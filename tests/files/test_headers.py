"""Headers are written as safetensors writes them and read more strictly; directories are understood or refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from harness.profiles import examples
from harness.refusals import refusal
from mupscale.files.directory import read_directory
from mupscale.files.floats import FLOATS, TORCH_NAMES
from mupscale.files.headers import header_bytes, parse_header, read_header
from mupscale.files.places import KNOWN, RANK, dtype_name, runs, torch_dtype
from mupscale.files.strict import parse_json

Tensors = dict[str, torch.Tensor]


def described(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def written(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> bytes:
    save_file(tensors, path, metadata=metadata)
    return path.read_bytes()


def test_headers_are_those_of_save_file_for_every_dtype(tmp_path):
    tensors: Tensors = {"scalar": torch.zeros(()), "none": torch.zeros(0, 4), 'é中"\\\n': torch.zeros(1)}
    for dtype in RANK:
        tensors |= {
            f"{name}.{dtype}": torch.zeros(shape).to(torch_dtype(dtype))
            for name, shape in (("b", (3, 5)), ("a", (2,)))
        }
    raw = written(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    head = header_bytes(described(tensors), {"format": "pt"})
    assert raw.startswith(head)
    assert raw != written(tensors, tmp_path / "other.safetensors"), "control: the metadata are seen"
    del tensors['é中"\\\n']  # a name with a line break is written as safetensors does, and not read
    raw = written(tensors, tmp_path / "m.safetensors")
    found = read_header(tmp_path / "m.safetensors")
    assert found.size == len(raw)
    assert found.data == len(header_bytes(described(tensors)))
    assert {name: (p.dtype, p.shape) for name, p in found.tensors.items()} == described(tensors)


@examples(60)
@given(
    st.dictionaries(
        st.text("ab.é_0", min_size=1, max_size=6),
        st.tuples(
            st.sampled_from(["F32", "BF16", "F16", "F64", "I64", "U8", "BOOL"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
    )
)
def test_any_set_of_tensors_is_laid_out_as_save_file_does(tmp_path_factory, entries):
    tensors = {name: torch.zeros(shape).to(torch_dtype(dtype)) for name, (dtype, shape) in entries.items()}
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    raw = written(tensors, path, {"format": "pt"})
    assert raw.startswith(header_bytes(described(tensors), {"format": "pt"}))
    assert read_header(path).tensors.keys() == tensors.keys()


def entry(**changes: Any) -> bytes:
    usual: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return json.dumps({"w": usual | changes}).encode()


BROKEN = {
    "file.unknown_dtype": [entry(dtype="F33"), entry(dtype="F4")],
    "file.name_has_control_characters": [b'{"\\u0000":{}}'],
    "header.offsets_unlike_shape": [entry(shape=[3]), entry(data_offsets=[8, 0])],
    "header.not_whole_numbers": [entry(shape=[-2]), entry(data_offsets=[0, True])],
    "header.too_many_numbers": [entry(data_offsets=[8]), entry(shape=[2, *[1] * 99])],
    "header.gap_between_tensors": [entry(data_offsets=[8, 16])],
    "header.other_keys": [entry(extra=1)],
    "header.not_an_object": [b"[1]"],
    "header.metadata_not_texts": [b'{"__metadata__":{"a":1}}'],
    "json.nested_too_deeply": [b'{"w":' + b"[" * 100_000],
    "json.key_twice": [b'{"w":1,"w":2}'],
    "json.not_finite": [entry(shape=[float("nan")])],
    "json.too_many_digits": [b'{"w":' + b"9" * 5000 + b"}"],
    "json.beyond_every_float": [b'{"w":1e999}'],
    "json.not_json": [b'{"w"', b'{"\xff":1}'],
    "json.too_many_items": [b"{" + b"," * 5_000_000],
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_header_is_refused_with_its_reason(code):
    for raw in BROKEN[code]:
        refusal(partial(parse_header, raw, "m.safetensors", 16 + len(raw)), code, where="m.safetensors")


def test_a_sound_header_is_read():
    """Control of the refusals above."""
    raw = entry()
    assert parse_header(raw, "m.safetensors", 16 + len(raw)).tensors["w"].offset == 8 + len(raw)
    refusal(lambda: parse_header(raw, "m.safetensors", 15 + len(raw)), "header.other_file_size")


def test_overlaps_and_truncation_are_found(tmp_path):
    two = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    raw = json.dumps(two).encode()
    error = refusal(lambda: parse_header(raw, "m", 8 + len(raw) + 6), "header.tensors_overlap")
    assert error.faults[0].where == "b"
    path = tmp_path / "m.safetensors"
    raw = written({"w": torch.zeros(100)}, path)
    for size in (0, 7, 20, len(raw) - 1):
        path.write_bytes(raw[:size])
        code = "file.cut_short" if size <= 20 else "header.other_file_size"
        refusal(lambda: read_header(path), code, where="m.safetensors")
    path.write_bytes((10**9).to_bytes(8, "little") + bytes(100))
    refusal(lambda: read_header(path), "file.cut_short")
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    refusal(lambda: read_header(path), "header.too_long", where="200000000")


def test_json_of_configs_may_have_infinity_and_nothing_else_may():
    assert parse_json(b"[Infinity]", "config.json", infinity=True) == [float("inf")]
    refusal(lambda: parse_json(b"[Infinity]", "index"), "json.not_finite")
    refusal(lambda: parse_json(b"[NaN]", "config.json", infinity=True), "json.not_finite")


@examples(100)
@given(st.data())
def test_runs_copy_rectangles(cases):
    """Run by run, a rectangle of one array lands in another as slicing puts it there."""
    dims = cases.draw(st.integers(0, 4))
    shape = [cases.draw(st.integers(0, 3)) for _ in range(dims)]
    pads = [[cases.draw(st.integers(0, 2)) for _ in range(dims)] for _ in range(4)]
    whole = [n + a + b for n, a, b in zip(shape, pads[0], pads[1], strict=True)]
    room = [n + a + b for n, a, b in zip(shape, pads[2], pads[3], strict=True)]
    source = torch.arange(1, 1 + torch.Size(whole).numel())
    found, want = torch.zeros(torch.Size(room).numel(), dtype=torch.long), torch.zeros(room, dtype=torch.long)
    for far, near, count in runs(whole, pads[0], room, pads[2], shape):
        found[near : near + count] = source[far : far + count]
    target = tuple(slice(a, a + n) for a, n in zip(pads[2], shape, strict=True))
    want[target] = source.view(whole)[tuple(slice(a, a + n) for a, n in zip(pads[0], shape, strict=True))]
    assert torch.equal(found.view(room), want)


def directory(path: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file(tensors or {"w": torch.zeros(2, 3)}, path / "model.safetensors")
    return path


def sharded(path: Path, **where: str) -> Path:
    directory(path)
    (path / "model.safetensors").unlink()
    for name, file in where.items():
        save_file({name: torch.zeros(2)}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def test_a_directory_is_sorted_into_weights_carried_files_and_a_trainers(tmp_path):
    path = directory(tmp_path)
    for name in (
        *("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "generation_config.json"),
        *("README.md", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json"),
        *(
            "training_args.bin",
            "pytorch_model.bin",
            "modeling_x.py",
            "mupscale.json",
            "model.fp16.safetensors",
        ),
        "LICENSE",
    ):
        (path / name).write_text("{}")
    (path / "1_Pooling").mkdir()
    found = read_directory(path)
    assert found.weights == ("model.safetensors",)
    assert found.tensors["w"].shape == (2, 3)
    assert set(found.carried) == {
        *("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "generation_config.json"),
        "LICENSE",
    }
    assert set(found.trainer) == {
        *("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json", "training_args.bin")
    }
    assert set(found.skipped) == {
        *("README.md", "pytorch_model.bin", "modeling_x.py", "mupscale.json", "model.fp16.safetensors"),
        "1_Pooling",
    }


def test_links_of_a_cache_are_followed_and_others_are_refused(tmp_path):
    """In a cache, snapshots/<revision>/<file> is a link to ../../blobs/<digest>."""
    real, hub = directory(tmp_path / "real"), tmp_path / "models--a--b"
    cache, blobs = hub / "snapshots" / "0123abcd", hub / "blobs"
    for folder in (cache, blobs):
        folder.mkdir(parents=True)
    (real / "tokenizer.json").write_text("{}")
    for number, file in enumerate(sorted(real.iterdir())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (cache / file.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    (tmp_path / "latest").symlink_to(cache)
    for path in (cache, tmp_path / "latest"):
        found = read_directory(path)
        assert found.tensors == read_directory(real).tensors
        assert found.carried == ("tokenizer.json",)
    secret = tmp_path / "secret.txt"
    secret.write_text("not part of a checkpoint")
    for home in (cache, real):
        for name in ("notes.txt", "optimizer.pt"):
            (home / name).symlink_to(secret)
            refusal(partial(read_directory, home), "directory.link_leads_outside", where=[name, "secret.txt"])
            (home / name).unlink()
    (real / "copy.txt").symlink_to("tokenizer.json")
    assert "copy.txt" in read_directory(real).carried, "control: a link inside of the directory"
    (real / "model.safetensors").rename(tmp_path / "w.safetensors")
    (real / "model.safetensors").symlink_to(tmp_path / "w.safetensors")
    refusal(
        lambda: read_directory(real),
        "directory.link_leads_outside",
        where=["model.safetensors", "w.safetensors"],
    )


def test_what_cannot_be_widened_is_refused_with_the_remedy(tmp_path):
    path = directory(tmp_path / "m")
    (path / "config.json").unlink()
    refusal(lambda: read_directory(path), "directory.no_config", where="config.json")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").touch()
    refusal(lambda: read_directory(path), "checkpoint.pickled_weights", where="pytorch_model.bin")
    directory(path)
    assert read_directory(path), "control: next to safetensors a pickle is no matter"
    (path / "adapter_config.json").touch()
    refusal(lambda: read_directory(path), "directory.holds_an_adapter")
    (path / "adapter_config.json").unlink()
    (path / "model.safetensors.index.json").write_text("{}")
    refusal(lambda: read_directory(path), "directory.two_sets_of_weights")
    refusal(
        lambda: read_directory(directory(tmp_path / "q", quantization_config={"bits": 4})),
        "checkpoint.is_quantised",
        where="quantization_config",
    )
    packed = tmp_path / "q"
    for name, tensor in (
        ("a.weight", torch.zeros(2, dtype=torch.int8)),
        ("a.weight", torch.zeros(2).to(torch.float8_e4m3fn)),
        ("a.qweight", torch.zeros(2, dtype=torch.int32)),
        ("a.weight.absmax", torch.zeros(2)),
    ):
        directory(packed, {name: tensor})
        refusal(lambda: read_directory(packed), "checkpoint.is_quantised", where=name)
    integers = {"n.num_batches_tracked": torch.tensor(3), "p.position_ids": torch.arange(4)}
    assert read_directory(directory(tmp_path / "q", integers)), (
        "control: integer buffers are no quantised weights"
    )
    strange = directory(tmp_path / "s", auto_map={"AutoModel": "x.Y"}, model_type="no_such_type")
    refusal(
        lambda: read_directory(strange), "config.code_with_checkpoint", where=["auto_map", "no_such_type"]
    )
    known = directory(tmp_path / "s", auto_map={"AutoModel": "modeling_x.Model"})
    refusal(lambda: read_directory(known), "config.code_with_checkpoint", where="auto_map")
    assert read_directory(directory(tmp_path / "s", auto_map={})), "control: no code"
    refusal(
        lambda: read_directory(directory(tmp_path / "s", model_type=3)),
        "config.no_model_type",
        where="model_type",
    )
    refusal(lambda: read_directory(tmp_path / "nowhere"), "directory.does_not_exist", where="nowhere")


def test_an_index_must_agree_with_its_files(tmp_path):
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    path = sharded(tmp_path / "m", a=a, b=b)
    assert set(read_directory(path).tensors) == {"a", "b"}
    index = path / "model.safetensors.index.json"

    def says(**where: Any) -> None:
        index.write_text(json.dumps({"weight_map": where}))

    says(a=a, b=b, c=b)
    error = refusal(lambda: read_directory(path), "directory.index_names_missing_tensor", where=b)
    assert [fault.where for fault in error.faults] == ["c"]
    says(a=a, c=b)
    error = refusal(lambda: read_directory(path))
    found = {(fault.where, fault.code) for fault in error.faults}
    assert found == {("b", "directory.index_lacks_tensor"), ("c", "directory.index_names_missing_tensor")}
    says(a=b, b=a)
    refusal(lambda: read_directory(path), "directory.index_names_other_file", where=[a, b])
    strange: dict[str, list[Any]] = {
        "file.name_with_folders": ["../x.safetensors", "/x.safetensors", "x/y.safetensors", ".."],
        "file.name_not_text": ["", 3],
        "file.name_has_control_characters": ["x\0.safetensors"],
        "directory.index_names_no_safetensors": ["x.bin"],
    }
    for code, names in strange.items():
        for name in names:
            says(a=name)
            refusal(partial(read_directory, path), code, where="model.safetensors.index.json")
    says()
    refusal(lambda: read_directory(path), "directory.index_without_map")
    says(a=a, b=b)
    (path / b).write_bytes((path / b).read_bytes()[:-1])
    refusal(lambda: read_directory(path), "header.other_file_size", where=b)
    (path / b).unlink()
    refusal(lambda: read_directory(path), "file.does_not_exist", where=b)


def test_every_name_that_torch_has_for_a_float_is_known():
    """And float8, which holds no weights here, is the control: it has a name in safetensors and none in the table."""
    dtypes = {
        name: getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)
    }
    known = {name: dtype_name(dtype) for name, dtype in dtypes.items() if dtype in KNOWN}
    assert {name: known[name] for name in known if known[name] in FLOATS} == TORCH_NAMES
    assert known["float8_e5m2"] not in FLOATS
