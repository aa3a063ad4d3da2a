"""Which end of a plan a model, or a set of named shapes, must match; all faults at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..arguments import wrong_kind
from ..errors import Fault, raise_faults
from ..models.names import named_tensors, resolve, tied_names, unique_tensors
from ..rules.axes import Axis, fraction_fault
from .more_experts import refuse_equal_scores
from .plan import Plan
from .tensor_plan import TensorPlan

End = Literal["base", "wide"]


def expect_plan(plan: object, model: object = None) -> None:
    """Raise unless `plan` is a plan, and `model`, where one is given, a module."""
    faults = wrong_kind(
        "plan", plan, Plan, "write plan=plan_between(make, base, wide), or Plan.from_json(text)"
    )
    if model is not None:
        faults += wrong_kind("model", model, nn.Module, "hand over the module, whose tensors have names")
    raise_faults("a plan and a model are needed here", faults)


def expect_proved(plan: Plan, prove: bool) -> None:
    """Raise unless the plan was proved, or the caller goes without a proof.

    >>> expect_proved(Plan({}), prove=False)
    >>> expect_proved(Plan({}, proof="loss"), prove=True)
    """
    if plan.proved or not prove:
        return
    what = "it follows from shapes, and shapes do not show what the model's code does with them"
    remedy = (
        "make it with infer_plan(base, wide, loss=…) or example_inputs=…, or write prove=False to go without "
        "a proof"
    )
    raise_faults("nothing has proved this plan", [Fault("proof.missing", "plan", what, remedy)])


def expect_exact(plan: Plan, prove: bool, noise: object) -> None:
    """Raise unless weights may be grown by this plan: it was proved, or the caller goes without a proof, and if it gives tokens
    to one of several copies, there is noise that parts them.

    >>> expect_exact(Plan({}), prove=False, noise=None)
    """
    expect_proved(plan, prove)
    if noise is None:
        refuse_equal_scores(plan)


def planned_parameters(model: nn.Module, plan: Plan, end: End) -> dict[int, str]:
    """The id of every parameter that the plan knows at one end -> its planned name there.

    >>> layer, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    >>> plan = Plan.identity([("1.weight", "parameter", (2, 2))])
    >>> names = planned_parameters(nn.Sequential(layer, layer, other), Plan(plan.tensors, {"0.weight": "1.weight"}), "wide")
    >>> names == {id(layer.weight): "1.weight"}
    True
    """
    known = plan.sources if end == "base" else plan
    names: dict[int, str] = {}
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and (found := resolve(name, known)) is not None:
            names.setdefault(id(tensor), found if end == "base" else plan.planned(found))
    return names


def expect_since(since: object, model: object = None) -> None:
    """Raise unless `since` is a plan, and `model`, where one is given, a module."""
    faults = wrong_kind("since", since, Plan, "write the run, or the plan from the reference to its model")
    if model is not None:
        faults += wrong_kind("model", model, nn.Module, "hand over the module, whose tensors have names")
    raise_faults("a model and the plan since its reference are needed here", faults)


def check_end(plan: Plan, model: nn.Module, end: End) -> None:
    """Raise unless `model` is exactly what the plan expects at its base or wide end."""
    expect_plan(plan, model)
    tensors = {name: t for name, _, t in named_tensors(model)}
    check_shapes(plan, {name: tuple(t.shape) for name, t in tensors.items()}, end)


def check_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]], end: End, complete: bool = True) -> None:
    """Raise unless these named shapes are the plan's at one end; `complete` asks for all of them."""
    faults: list[Fault] = []
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in plan.tensors.items():
        if end == "wide":
            expected[name] = tensor.wide_shape
        else:
            expected.update(dict.fromkeys(tensor.sources, tensor.source_shape))
    expected.update({alias: expected[name] for alias, name in plan.ties.items() if name in expected})
    unknown = (name for name in shapes if resolve(name, expected) is None)
    raise_faults("adapters have no units in a plan", _adapters(unknown))
    seen = set()
    for name, shape in shapes.items():
        known = resolve(name, expected)
        if known is None:
            faults.append(
                Fault(
                    "plan.unknown_tensor",
                    name,
                    f"no tensor of the plan has this name at its {end} end",
                    "infer the plan from this very model, or use plan.rename",
                )
            )
            continue
        seen.add(known)
        if shape != expected[known]:
            what = f"shape {shape}, the plan's {end} end has {expected[known]}"
            faults.append(
                Fault(
                    "plan.other_shape",
                    name,
                    what,
                    f"build the {end} model as for the plan, or infer the plan anew",
                )
            )
    if complete:
        missing = [name for name in expected if name not in seen and name not in plan.ties]
        faults += [
            Fault(
                "plan.missing_tensor",
                name,
                f"the plan expects this tensor at its {end} end; it is missing",
                "infer the plan from this very model",
            )
            for name in missing
        ]
    raise_faults(f"this is not the {end} model of the plan", faults)


def _adapters(names: Iterable[str]) -> list[Fault]:
    """A fault if a model carries adapters of PEFT: they are new tensors, and the model's own are frozen.

    >>> [fault.where for fault in _adapters(["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.default.weight"])]
    ['base_model.model.q.lora_A.default.weight']
    """
    found = next((name for name in names if ".lora_" in name), None)
    remedy = (
        "train the adapters alone with a plain optimizer over the parameters that require gradients; to train the model's own "
        "weights, merge them first: merge_and_unload().requires_grad_(True)"
    )
    return (
        []
        if found is None
        else [Fault("model.has_adapters", found, "an adapter: a new tensor, which did not grow", remedy)]
    )


def check_ties(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Raise if tensors that are tied in the plan are separate in the model, or the reverse."""
    faults = []
    for alias, name in plan.ties.items():
        a, b = tensors.get(alias), tensors.get(name)
        if a is None or b is None or a is b or a.is_meta or b.is_meta or a.shape != b.shape:
            continue
        if not torch.equal(a.detach(), b.detach()):
            remedy = "tie them again, or infer a plan from the untied models"
            faults.append(
                Fault(
                    "plan.tied_only_in_plan",
                    f"{alias} = {name}",
                    "tied in the plan, two different tensors here",
                    remedy,
                )
            )
    for name, other in tied_names(tensors).items():
        planned = {plan.planned(n) for n in (resolve(name, plan) or name, resolve(other, plan) or other)}
        if isinstance(tensors[name], nn.Parameter) and len(planned) > 1:
            remedy = "infer the plan from models that are tied like this one"
            faults.append(
                Fault(
                    "plan.tied_only_in_model", f"{name} = {other}", "one tensor here, two in the plan", remedy
                )
            )
    raise_faults("the plan and the model disagree about ties", faults)


def check_duplicates(plan: Plan) -> None:
    """Raise unless every axis grows by whole copies (and zeros)."""
    axes = {(name, dim): axis for name, t in plan.tensors.items() for dim, axis in enumerate(t.axes)}
    whole = {(axis.base, axis.wide) for axis in axes.values() if axis.duplicates and axis.wide > axis.base}
    faults = []
    for (name, dim), axis in axes.items():
        if axis.duplicates:
            continue
        fault = fraction_fault(f"{name}, axis {dim}", axis)
        parts = next((part for part in sorted(whole) if _is_part(*part, axis)), None)
        if parts is not None:
            remedy = (
                f"if {parts[0]} growing units lie next to fixed ones here, as after a concatenation: one tensor has one "
                f"learning rate, so {_split_lines(name, dim, plan[name], parts)}; otherwise {fault.remedy}"
            )
            fault = fault._replace(remedy=remedy)
        faults.append(fault)
    raise_faults("copies come in whole numbers", faults)


def _split_lines(name: str, dim: int, entry: TensorPlan, part: tuple[int, int]) -> str:
    """What to write in place of a linear layer that reads or writes growing units next to fixed ones."""
    path, _, leaf = name.rpartition(".")
    if leaf != "weight" or len(entry.axes) != 2 or not path:
        return "give the fixed part a layer of its own, and add the outputs of both layers"
    (m, n), own = (axis.base for axis in entry.axes), path.rpartition(".")[2]
    size = entry.axes[dim].base
    times = (entry.axes[dim].wide - size) // (part[1] - part[0])
    grown, fixed = times * part[0], size - times * part[0]
    if dim == 1:
        layers = f"nn.Linear({grown}, {m}), nn.Linear({fixed}, {m}, bias=False)"
        call = f"self.{own}(growing) + self.{own}_fixed(fixed)"
    else:
        layers = f"nn.Linear({n}, {grown}), nn.Linear({n}, {fixed})"
        call = f"torch.cat([self.{own}(x), self.{own}_fixed(x)], -1)"
    return (
        f"split this Linear: `self.{own}, self.{own}_fixed = {layers}`, with {times * part[1]} for {grown} in the wide model, "
        f"and in forward `{call}`"
    )


def _is_part(base: int, wide: int, axis: Axis) -> bool:
    """Whether a number of parts that grow from `base` to `wide`, and others that do not, can make up an axis."""
    times, rest = divmod(axis.wide - axis.base, wide - base)
    return times > 0 and rest == 0 and times * base < axis.base


def identity_plan(model: nn.Module) -> Plan:
    """The plan that leaves `model` as it is, ties included."""
    tensors, ties = unique_tensors(model)
    shapes = [(name, kind, tuple(tensor.shape)) for name, (kind, tensor) in tensors.items()]
    return replace(Plan.identity(shapes), ties=ties)
