"""A `torch.distributed.checkpoint` directory as a source: which of its keys belong to which planned tensor.

Trainers save `{"model": …, "optim": …}` or the model's names at the top level; both are found. If two sets of
tensors fit (a model and its average), they are refused until `prefix` names one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from itertools import combinations
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.dcp.chunks import read_value
from ..files.dcp.table import ChunkedTensor, DcpDirectory
from ..files.places import is_dtype
from ..files.strict import printable, raise_few
from ..models.names import strip_wrappers
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..rules.optimizers import RULES
from ..tensors.parts import Rectangle
from .source import FiledTensor, Source

_NAMED = "save it with torch's get_optimizer_state_dict, which names parameters, or give the plan the same names with plan.rename"


def dcp_source(
    directory: DcpDirectory,
    plan: Plan,
    prefix: str | None = None,
    state: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Source:
    """The tensors of a checkpoint that the base end of the plan names; with `state`, also its optimizer state."""
    path = directory.path
    keys = {strip_wrappers(key): key for key in directory.tensors}
    chosen = (
        _prefix(plan, keys, printable(str(path)))
        if prefix is None
        else prefix.removesuffix(".") + "." * bool(prefix)
    )
    weights: dict[str, FiledTensor] = {}
    faults: list[Fault] = []
    used: set[str] = set()
    for name, entry in plan.tensors.items():
        if not entry.sources or entry.fill == "own":
            continue
        found = [_present(source, plan, chosen, keys) for source in entry.sources]
        lost = [source for source, key in zip(entry.sources, found, strict=True) if key is None]
        if entry.kind == "buffer" and lost:
            continue  # the wide model computes it, or its absence is noticed there
        faults += [
            Fault(
                "checkpoint.tensor_missing",
                chosen + printable(s),
                "the plan needs this tensor, the checkpoint does not have it",
            )
            for s in lost
        ]
        if entry.stack is not None:
            what = "a stack of copies of a dense layer, which is not read from chunks"
            faults.append(
                Fault(
                    "dcp.stack_not_read",
                    chosen + printable(name),
                    what,
                    "save a Hugging Face directory and load that",
                )
            )
            continue
        tensors = [directory.tensors[key] for key in found if key is not None]
        odd = [tensor.dtype for tensor in tensors if not is_dtype(tensor.dtype)]
        faults += [
            Fault("dcp.dtype_cannot_grow", chosen + printable(name), f"a tensor of {dtype} cannot be widened")
            for dtype in odd
        ]
        used.update(key for key in found if key is not None)
        if not lost:
            made = _joined(tensors, entry.cat)
            weights[name] = made
            if made.shape != entry.base_shape:
                what = f"shape {made.shape} in the checkpoint, {entry.base_shape} at the plan's base end"
                faults.append(
                    Fault(
                        "checkpoint.shape_differs",
                        chosen + printable(name),
                        what,
                        "use the plan that starts at this checkpoint's model",
                    )
                )
    faults += _left_over(plan, chosen, keys, used)
    raise_few(f"{printable(str(path))} is not the base of this plan", faults)
    states, settings = (
        _optimizer(directory, plan, chosen, RULES if rules is None else rules) if state else ({}, {})
    )
    return Source(path, f"DCP {directory.digest} under {chosen!r}", weights, states, settings)


def _joined(tensors: list[ChunkedTensor], cat: int | None) -> FiledTensor:
    """One base tensor from its sources, concatenated along `cat` when there are several."""
    pieces, first = [], 0
    for tensor in tensors:
        start = tuple(first if dim == cat else 0 for dim in range(len(tensor.shape)))
        pieces.append((Rectangle(start, tensor.shape), tensor))
        first += tensor.shape[cat] if cat is not None else 0
    shape = list(tensors[0].shape)
    if cat is not None:
        shape[cat] = first
    return FiledTensor(tensors[0].dtype, tuple(shape), tuple(pieces))


def _names(source: str, plan: Plan) -> list[str]:
    return [source, *(alias for alias, name in plan.ties.items() if name == source)]


def _present(source: str, plan: Plan, prefix: str, keys: Mapping[str, str]) -> str | None:
    return next((keys[prefix + name] for name in _names(source, plan) if prefix + name in keys), None)


def _prefix(plan: Plan, keys: Mapping[str, str], where: str) -> str:
    """The prefix of the model's names in the checkpoint."""
    wanted = [s for e in plan.tensors.values() if e.kind == "parameter" for s in e.sources]
    if not wanted:
        return ""
    ends = [end for source in wanted[:3] for end in _names(source, plan)]
    candidates = {key[: -len(end)] for key in keys for end in ends if key == end or key.endswith(f".{end}")}
    counts = {p: sum(_present(s, plan, p, keys) is not None for s in wanted) for p in candidates}
    best = max(counts.values(), default=0)
    if best == 0:
        some = ", ".join(printable(key) for key in list(keys)[:3])
        remedy = "use plan.rename to spell names as the checkpoint does, or infer the plan from its model"
        fault = Fault(
            "dcp.no_name_fits",
            printable(wanted[0]),
            f"no tensor of the checkpoint ends like this; it has {some}, …",
            remedy,
        )
        raise MupscaleError(f"{where} is not the base of this plan", [fault])
    fitting = sorted(p for p, count in counts.items() if count == best)
    if len(fitting) > 1:
        prefixes = " and ".join(repr(printable(p)) for p in fitting)
        raise MupscaleError(
            f"{where} holds several sets of tensors that fit, under {prefixes}; write prefix={fitting[0]!r}, for example",
            code="dcp.several_prefixes_fit",
        )
    return fitting[0]


def _left_over(plan: Plan, prefix: str, keys: Mapping[str, str], used: set[str]) -> list[Fault]:
    """Tensors of the checkpoint's model that the plan does not use. Without a prefix, only those whose first name
    part is in the plan."""
    sources = {s for e in plan.tensors.values() for s in e.sources} | set(plan.ties)
    tops = {source.partition(".")[0] for source in sources}
    what = "the checkpoint has this tensor, and no tensor of the plan is made from it"
    return [
        Fault("checkpoint.tensor_not_in_plan", printable(key), what)
        for key, original in keys.items()
        if key.startswith(prefix)
        and original not in used
        and key[len(prefix) :] not in sources
        and (prefix or key.partition(".")[0] in tops)
    ]


def _optimizer(
    directory: DcpDirectory, plan: Plan, prefix: str, rules: Mapping[str, OptimizerRule]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """State and settings by wide name, from `…state.<name>.<key>` and `…param_groups.<name or number>.<key>`."""
    wide: dict[str, list[str]] = {}
    for source, names in plan.sources.items():
        for spelled in _names(source, plan):
            wide.setdefault(spelled, []).extend(names)
            wide.setdefault(
                prefix + spelled, wide[spelled]
            )  # some optimizers name parameters as the file does
    leaves = {leaf for rule in rules.values() for leaf in rule.state}
    constants = {key for rule in rules.values() for row in rule.every_row for key in row.constants}
    found: dict[str, dict[str, str]] = {}
    roots: dict[str, set[str]] = {}
    unknown: list[str] = []
    for key in (*directory.tensors, *directory.values):
        whole = strip_wrappers(key)
        path, _, leaf = whole.rpartition(".")
        cuts = [match.start() for match in re.finditer(r"(?:^|(?<=\.))state\.", f"{path}.")]
        options = [(whole[:at], path[at + len("state.") :]) for at in cuts]
        fitting = [(root, name) for root, name in options if name in wide]
        if fitting:
            root, name = fitting[0]
            found.setdefault(name, {})[leaf] = key
            roots.setdefault(root, set()).add(name)
        elif options and leaf in leaves and whole not in {prefix + name for name in wide}:
            unknown.append(key)
    faults = [
        Fault(
            "dcp.state_of_no_parameter", printable(key), "optimizer state of no parameter of the plan", _NAMED
        )
        for key in unknown
    ]
    twice = {name for a, b in combinations(roots.values(), 2) for name in a & b}
    places = ", ".join(f"{printable(root)}state" for root in sorted(roots))
    faults += [
        Fault(
            "dcp.state_in_two_places",
            printable(name),
            f"it has state in more than one of {places}",
            "save one",
        )
        for name in sorted(twice)
    ]
    raise_few(f"the optimizer state of {printable(str(directory.path))} is ambiguous", faults)
    groups: dict[str, dict[str, Any]] = {}
    for root in roots:
        groups |= _groups(directory, f"{root}param_groups.", wide, constants)
    settings = {end: values for name, values in groups.items() for end in wide[name]}
    sources = {spelled: names for spelled, names in wide.items() if spelled in found}
    states = {
        end: _joined_state(directory, plan, end, found, prefix) for ends in sources.values() for end in ends
    }
    return states, {**settings, **{end: settings.get(end, {}) for end in states}}


def _joined_state(
    directory: DcpDirectory, plan: Plan, end: str, found: Mapping[str, Mapping[str, str]], prefix: str
) -> dict[str, Any]:
    """The state of one wide tensor. The states of several sources are concatenated in the same way as the sources."""
    entry = plan[end]
    spelled = [
        next((n for name in _names(source, plan) for n in (name, prefix + name) if n in found), None)
        for source in entry.sources
    ]
    made: dict[str, Any] = {}
    for leaf in sorted({leaf for name in spelled if name is not None for leaf in found[name]}):
        keys = [found[name].get(leaf) if name is not None else None for name in spelled]
        parts = [directory.tensors.get(key or "") for key in keys]
        tensors = [part for part in parts if part is not None]
        if len(tensors) == len(keys) and (len(keys) == 1 or tensors[0].shape):
            made[leaf] = _joined(tensors, entry.cat)
        elif None in keys or (
            len(keys) > 1 and not all(_value(directory, k) == _value(directory, keys[0]) for k in keys)
        ):
            what = (
                f"its {printable(leaf)} is not the same, or not there, for all of {', '.join(entry.sources)}"
            )
            raise MupscaleError(
                "state of several tensors cannot be joined", [Fault("state.sources_disagree", end, what)]
            )
        else:
            made[leaf] = _stored_or_value(directory, str(keys[0]))
    return made


def _value(directory: DcpDirectory, key: str | None) -> Any:
    """A number, wherever it is stored."""
    if key not in directory.tensors:
        return read_value(directory.path, directory.values[str(key)])
    stored = directory.tensors[str(key)]
    source = Source(directory.path, "", {})
    try:
        return source.number(_joined([stored], None)).item()
    finally:
        source.close()


def _stored_or_value(directory: DcpDirectory, key: str) -> Any:
    if key in directory.tensors:
        return _joined([directory.tensors[key]], None)
    return read_value(directory.path, directory.values[key])


def _groups(
    directory: DcpDirectory, root: str, names: Iterable[str], constants: Set[str]
) -> dict[str, dict[str, Any]]:
    """The settings of every parameter's group: values if exactness depends on them, otherwise only the keys."""
    values = {strip_wrappers(key): where for key, where in directory.values.items() if key.startswith(root)}
    members: dict[str, str] = {}
    for key, where in values.items():
        if key.endswith(".params"):
            listed = read_value(directory.path, where)
            members.update(
                {strip_wrappers(str(n)): key[: -len("params")] for n in listed if isinstance(listed, list)}
            )
    seen: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    leaves: dict[str, list[str]] = {}
    for key in values:
        base, _, leaf = key.rpartition(".")
        leaves.setdefault(f"{base}.", []).append(leaf)
    for name in names:
        start = members.get(name, f"{root}{name}.")
        for leaf in leaves.get(start, ()):
            if leaf in ("params", "param_names"):
                continue
            if leaf in constants and start + leaf not in seen:
                seen[start + leaf] = read_value(directory.path, values[start + leaf])
            found.setdefault(name, {})[leaf] = seen.get(start + leaf)
    return found
