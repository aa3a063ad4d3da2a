"""A format is one folder: a toy that no file of the package names grows through the one door."""

import json
import sys
from dataclasses import replace
from functools import partial
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch

import mupscale as mu
import mupscale.formats as room
from harness.refusals import refusal

HEAD = """
import json

from mupscale.files.places import OutFile, Place
from mupscale.formats.format import Asked, Format


def _is_at(place):
    return (place / "toy.json").exists()


"""
GROW = """
def _grow(asked):
    from mupscale.formats.common import Growing, WideFiles, fixed_file, write_grown
    from mupscale.jobs.job import Move

    stored = json.loads((asked.base / "toy.json").read_text())
    places = {name: Place(name, 0, "F32", tuple(shape)) for name, shape in stored.items()}
    weights = [Move(name, asked.plan[name].making(), (place,), place) for name, place in places.items()]

    def wide(growing):
        out = WideFiles(not_carried={"clock": "a toy has none"})
        shapes = {name: growing.plan[name].wide_shape for name in places}
        for name, place in places.items():
            target = Place(name, 0, "F32", shapes[name])
            out.moves.append(Move(name, growing.making(name), (place,), target))
            out.files.append(OutFile(name, target.bytes, ()))
        out.files.append(fixed_file("toy.json", json.dumps(shapes).encode()))
        return out

    return write_grown(asked.base, asked.out, Growing(asked.plan), asked.noise, asked.seed, weights=weights, make=wide)


FORMAT = Format("Toy", _is_at, _grow)
"""


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Where a test puts folders of the room `formats`."""
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path / "room")])
    (tmp_path / "room").mkdir()
    yield tmp_path / "room"
    if sys.modules.pop(f"{room.__name__}.toy", None) is not None:
        delattr(room, "toy")


def add(folders: Path, name: str, code: str) -> None:
    (folders / name).mkdir()
    (folders / name / "__init__.py").write_text(code)
    invalidate_caches()


def linear(width: int) -> torch.nn.Module:
    return torch.nn.Linear(width, width)


def saved(folder: Path) -> torch.nn.Module:
    model = linear(2)
    folder.mkdir()
    for name, tensor in model.state_dict().items():
        (folder / name).write_bytes(tensor.numpy().tobytes())
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    (folder / "toy.json").write_text(json.dumps(shapes))
    return model


@pytest.mark.parametrize("noise", [None, mu.SignalNoise(0.1)])
def test_a_folder_is_a_format_of_the_one_door(folders, tmp_path, noise):
    """Control: without the folder nothing knows what the checkpoint is."""
    base, out, plan = tmp_path / "base", tmp_path / "wide", mu.plans.plan_between(linear, 2, 4)
    model, grow = saved(base), partial(mu.grow_checkpoint, base, out, plan=plan, noise=noise)
    assert refusal(grow).codes == ("checkpoint.plan_is_found",)
    add(folders, "toy", HEAD + GROW)
    heard: list[Any] = []
    assert grow(on=heard.append).outcome == "written"
    assert [event.names for event in heard] == [{"clock": "a toy has none"}]
    wide = mu.grow(model, lambda: linear(4), plan=plan) if noise is None else None
    for name, shape in json.loads((out / "toy.json").read_text()).items():
        found = torch.frombuffer(bytearray((out / name).read_bytes()), dtype=torch.float32).view(shape)
        expected = model.state_dict()[name]
        assert tuple(found.shape) == plan[name].wide_shape != tuple(expected.shape)
        if wide is not None:
            assert torch.equal(found, wide.model.state_dict()[name])


def test_a_call_that_a_format_cannot_follow_is_refused(folders, tmp_path):
    add(folders, "toy", HEAD + GROW.replace("_grow)", "_grow, has_noise=False)"))
    base, plan = tmp_path / "base", mu.plans.plan_between(linear, 2, 4)
    saved(base)
    grow = partial(mu.grow_checkpoint, base, tmp_path / "wide")
    assert refusal(grow).codes == ("checkpoint.needs_plan",)
    assert refusal(partial(grow, plan=plan, multipliers=2)).codes == ("checkpoint.plan_is_the_goal",)
    noisy = refusal(partial(grow, plan=plan, noise=mu.SignalNoise(0.1)))
    assert noisy.codes == ("noise.not_in_format",)
    means = {name: replace(entry, mean=(0,)) for name, entry in plan.tensors.items()}
    refused = refusal(partial(grow, plan=plan.with_tensors(means)))
    assert set(refused.codes) == {"plan.mean_in_format"}
    assert grow(plan=plan).outcome == "written", "the remedy"


def test_a_checkpoint_of_two_formats_is_refused(folders, tmp_path):
    """Control: either alone is accepted."""
    add(folders, "toy", HEAD + GROW)
    base, plan = tmp_path / "base", mu.plans.plan_between(linear, 2, 4)
    saved(base)
    (base / "latest_universal").write_text("step1")
    grow = partial(mu.grow_checkpoint, base, tmp_path / "wide", plan=plan)
    assert refusal(grow).codes == ("checkpoint.two_formats",)
    (base / "latest_universal").unlink()
    assert grow().outcome == "written"
