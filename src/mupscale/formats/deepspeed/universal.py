"""A universal checkpoint of DeepSpeed: where the weight and the state of every parameter lie, and its settings.

    latest_universal                               the name of the folder below
    global_step5_universal/
        mp_rank_00_model_states.pt                 counters, schedule, what the user saved; ZeRO 3 writes one for every rank
        zero/optimizer_state.pt                    parameter groups
        zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

No pickle is executed. Settings may hold objects of DeepSpeed, such as its loss scaler; they become inert records.
Knows: the directory. Does not know: plans, units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import Fault, MupscaleError
from ...files.elsewhere import CONVERT, UNIVERSAL_LATEST, UNIVERSAL_SETTINGS, is_universal, tag_in
from ...files.pickles.torch_file import read_tensor, read_tree
from ...files.pickles.torch_settings import read_settings
from ...files.places import Place
from ...files.strict import name_fault, os_errors, printable, raise_few
from ...storage.location import Location, location
from ...storage.looking import exists, is_dir, names_in

SCHEDULER = "scheduler.pt"
PARAM = "param"
WEIGHT = "fp32"
STEP = "step"
_EXTRAS = frozenset({PARAM, "cat_dim", "param_n_sub_params", "vocab_tensor"})
"""What a file of a parameter may hold: its tensor, and how ranks of tensor parallelism cut it, which stays the same."""
_MOST_PARAMETERS = 1_000_000  # bounds the listing of a folder that is not a checkpoint


@dataclass(frozen=True)
class StateFile:
    """One tensor of a parameter, in a file of its own."""

    place: Place
    extras: Mapping[str, Any] | None
    """What lies next to the tensor in its file; None for a file of the tensor alone, which ZeRO 3 writes, without its shape."""


@dataclass(frozen=True)
class Universal:
    """The content of a universal checkpoint. Places are relative to the directory that holds `latest_universal`."""

    path: Location
    tag: str
    parameters: Mapping[str, Mapping[str, StateFile]]
    steps: Mapping[str, Any]
    """The step of every parameter that has its own, as it was saved: a number or a tensor."""
    settings: Mapping[str, Any]
    """What `optimizer_state.pt` holds."""
    models: Mapping[str, Mapping[str, Any]]
    """What every file of model states holds."""
    schedule: Any = None
    """What `scheduler.pt` holds, which Hugging Face's Trainer writes next to the folder."""


def read_universal(path: Location | str) -> Universal:
    """Read everything about a universal checkpoint except its tensors; raises one error with all faults."""
    path = location(path)
    if not is_universal(path):
        what = f"it has no {UNIVERSAL_LATEST}; checkpoints of ZeRO itself are cut by ranks"
        raise MupscaleError(
            "this is not a universal checkpoint of DeepSpeed",
            [Fault("deepspeed.not_universal", str(path), what, CONVERT)],
        )
    tag = tag_in(path)
    folder = path / tag / "zero"
    claim = f"{printable(str(path / tag))} cannot be widened"
    if not exists(folder / UNIVERSAL_SETTINGS):
        raise MupscaleError(
            claim, [Fault("deepspeed.no_settings", f"zero/{UNIVERSAL_SETTINGS}", "it is not there", CONVERT)]
        )
    parameters: dict[str, dict[str, StateFile]] = {}
    steps: dict[str, Any] = {}
    faults: list[Fault] = []
    with os_errors(folder):
        names = sorted(name for name in names_in(folder) if name != UNIVERSAL_SETTINGS)
    if len(names) > _MOST_PARAMETERS:
        raise MupscaleError(
            f"{claim}: it has more than {_MOST_PARAMETERS:,} parameters", code="deepspeed.too_many_parameters"
        )
    for name in names:
        if name_fault(name) is not None or not is_dir(folder / name):
            faults.append(
                Fault(
                    "deepspeed.not_a_parameter",
                    f"zero/{printable(name)}",
                    "not the folder of a parameter",
                    "remove it",
                )
            )
            continue
        try:
            parameters[name], step = _parameter(path, f"{tag}/zero/{name}")
            steps |= {name: step[0]} if step else {}
        except MupscaleError as error:
            faults += error.faults or [Fault(error.code, f"zero/{printable(name)}", error.claim)]
    raise_few(claim, faults)
    models = {
        n: read_settings(path / tag / n)
        for n in sorted(names_in(path / tag))
        if n.endswith("_model_states.pt")
    }
    settings = read_settings(folder / UNIVERSAL_SETTINGS)
    if not models or not all(isinstance(of, dict) for of in (settings, *models.values())):
        what = "no file of model states" if not models else "a file of settings is not a dict"
        raise MupscaleError(
            claim,
            [
                Fault(
                    "deepspeed.settings_not_dict" if models else "deepspeed.no_model_states",
                    tag,
                    what,
                    CONVERT,
                )
            ],
        )
    schedule = read_settings(path / SCHEDULER) if exists(path / SCHEDULER) else None
    return Universal(path, tag, parameters, steps, settings, models, schedule)


def _parameter(path: Location, folder: str) -> tuple[dict[str, StateFile], list[Any]]:
    """The files of one parameter by state, and its step, if it has one."""
    found: dict[str, StateFile] = {}
    step: list[Any] = []
    for name in sorted(names_in(path / folder)):
        where, state = f"{folder}/{name}", name.removesuffix(".pt")
        if state == name:
            raise MupscaleError(
                "odd",
                [
                    Fault(
                        "deepspeed.not_a_state_file",
                        printable(where),
                        "not a file of torch.save",
                        "remove it",
                    )
                ],
            )
        tree = read_tree(path / where)
        if state == STEP:
            step = [read_tensor(path / folder, tree) if isinstance(tree, Place) else tree]
            continue
        extras = (
            {key: value for key, value in tree.items() if key != PARAM} if isinstance(tree, dict) else None
        )
        place = tree.get(PARAM) if isinstance(tree, dict) else tree
        unknown = sorted(map(str, (extras or {}).keys() - _EXTRAS))
        if not isinstance(place, Place) or unknown:
            what = (
                f"it holds {printable(', '.join(unknown))}, whose growth is not known"
                if unknown
                else "no tensor"
            )
            raise MupscaleError(
                "odd",
                [
                    Fault(
                        "deepspeed.unknown_state_entry" if unknown else "deepspeed.no_tensor",
                        printable(where),
                        what,
                    )
                ],
            )
        found[state] = StateFile(replace(place, file=where), extras)
    if WEIGHT not in found:
        raise MupscaleError(
            "odd", [Fault("deepspeed.no_weight", printable(folder), f"it has no {WEIGHT}.pt", CONVERT)]
        )
    return found, step
