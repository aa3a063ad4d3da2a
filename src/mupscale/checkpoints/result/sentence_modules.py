"""The modules of a sentence-transformers model besides its transformer: their folders at the new width.

The transformer's output consists of copies, in the order of the plan. A pooling layer keeps it so and only its width
changes. A dense layer sums over the copies, so its weight is copied and divided like every other; its output is the
base's own. Modules of other kinds are not known, and then none is carried.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ...errors import MupscaleError
from ...files.directory import CONFIG, SINGLE, Directory, Module
from ...files.headers import read_header
from ...files.places import OutFile, Place
from ...files.strict import parse_json, read_regular
from ...jobs.job import Move, Text
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...rules.axes import Axis
from ..shards import weight_moves

_WIDTHS = ("word_embedding_dimension", "embedding_dimension")
"""What older and newer versions call the width of a pooling layer."""
_PLAIN = ("Normalize", "Dropout")
"""Modules that work at every width."""


@dataclass(frozen=True)
class ModuleFiles:
    """What a job writes for the modules, or why they are not carried."""

    texts: tuple[Text, ...] = ()
    carried: tuple[str, ...] = ()
    files: tuple[OutFile, ...] = ()
    moves: tuple[Move, ...] = ()
    refused: str = ""


def module_files(directory: Directory, plan: Plan) -> ModuleFiles:
    """The files of all modules of a directory at the width of the plan."""
    found = ModuleFiles()
    folders = [module for module in directory.modules if module.folder]  # the first is the transformer itself
    axis = output_axis(plan) if folders else None
    for module in folders:
        try:
            new, axis = _module(directory, module, axis)
        except MupscaleError as error:
            return ModuleFiles(refused=f"{module.folder} ({module.kind}): {error.claim} [{error.code}]")
        found = ModuleFiles(
            (*found.texts, *new.texts),
            (*found.carried, *new.carried),
            (*found.files, *new.files),
            (*found.moves, *new.moves),
        )
    return found


def output_axis(plan: Plan) -> Axis | None:
    """How the last hidden state grows: as the rows of the embedding, which residuals add to it. None if it does not."""
    tables = [
        t for t in plan.tensors.values() if t.kind == "parameter" and len(t.axes) == 2 and not t.axes[0].grows
    ]
    return next((t.axes[1] for t in tables if t.axes[1].grows and t.axes[1].role == "out"), None)


def _module(directory: Directory, module: Module, axis: Axis | None) -> tuple[ModuleFiles, Axis | None]:
    """The files of one module, and the axis that its output grows along."""
    names = tuple(f"{module.folder}/{name}" for name in module.files)
    if module.kind in _PLAIN:
        return ModuleFiles(carried=names), axis
    if module.kind == "Pooling":
        settings = _settings(directory, module)
        widths = [key for key in _WIDTHS if key in settings]
        grown = {key: _grown(settings[key], axis) for key in widths}
        if not widths:
            raise MupscaleError(f"its {CONFIG} has no {_WIDTHS[0]}", code="config.width_missing")
        return ModuleFiles((_text(module, {**settings, **grown}),)), axis
    if module.kind == "Dense":
        return _dense(directory, module, axis)
    raise MupscaleError("what it does at another width is not known", code="family.unknown_module")


def _dense(directory: Directory, module: Module, axis: Axis | None) -> tuple[ModuleFiles, Axis | None]:
    settings = _settings(directory, module)
    width = _grown(settings.get("in_features"), axis)
    if settings.get("use_residual"):
        raise MupscaleError(
            "it adds its input to its output, which would have another width",
            code="family.module_adds_residual",
        )
    if SINGLE not in module.files:
        raise MupscaleError(
            f"its weights are not in {SINGLE}; load the model and call save_pretrained",
            code="directory.module_weights_elsewhere",
        )
    if axis is None:
        return ModuleFiles(carried=tuple(f"{module.folder}/{name}" for name in module.files)), None
    tensors = read_header(directory.path / module.folder / SINGLE).tensors
    entries = {}
    for name, place in tensors.items():
        inward = name.endswith("linear.weight") and place.shape == (settings.get("out_features"), axis.base)
        if not inward and len(place.shape) != 1:
            raise MupscaleError(
                f"its tensor {name} of shape {place.shape} is not known", code="family.unknown_module_tensor"
            )
        axes = tuple(map(Axis.fixed, place.shape))
        entries[name] = TensorPlan((name,), (axes[0], replace(axis, role="in")) if inward else axes)
    inner = replace(directory, path=directory.path / module.folder, tensors=tensors)
    files, moves, _ = weight_moves(Plan(entries), inner)
    others = tuple(f"{module.folder}/{n}" for n in module.files if n not in (CONFIG, SINGLE))
    return (
        ModuleFiles(
            (_text(module, {**settings, "in_features": width}),),
            others,
            tuple(replace(file, name=f"{module.folder}/{file.name}") for file in files),
            tuple(_inside(module.folder, move) for move in moves),
        ),
        None,  # its output has the base's width
    )


def _settings(directory: Directory, module: Module) -> dict[str, Any]:
    where = f"{module.folder}/{CONFIG}"
    settings = parse_json(read_regular(directory.path / where), where)
    if not isinstance(settings, dict):
        raise MupscaleError(f"its {CONFIG} holds no settings", code="config.not_an_object")
    return settings


def _grown(width: Any, axis: Axis | None) -> int:
    """A width of the base's configuration at the new size; None is the axis of an output that does not grow."""
    if type(width) is not int or (axis is not None and width != axis.base):
        expected = "a whole number" if axis is None else axis.base
        raise MupscaleError(
            f"its width is {width!r}, expected {expected}", code="config.module_width_differs"
        )
    return width if axis is None else axis.wide


def _text(module: Module, settings: dict[str, Any]) -> Text:
    return Text(f"{module.folder}/{CONFIG}", json.dumps(settings, indent=2) + "\n")


def _inside(folder: str, move: Move) -> Move:
    """The same move between files of a folder."""

    def there(place: Place) -> Place:
        return replace(place, file=f"{folder}/{place.file}")

    return replace(
        move,
        name=f"{folder}/{move.name}",
        sources=tuple(map(there, move.sources)),
        target=there(move.target),
    )
