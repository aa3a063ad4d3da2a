"""A plan for more experts in a mixture whose tokens go to as few of them as before.

A router scores every expert, and a token goes to the k that score highest. Twice the experts and the same k can be had in two
ways, which depend on the router:

    asleep   where a bias that training does not touch is added to the scores for the choice alone (DeepSeek-V3, GLM-4 MoE): new
             experts have a bias of -10,000, so no token goes to them, and everything else about them is zero. The run of the
             base continues exactly. A linear router without a bias cannot do this: no row scores lowest for every input.
    apart    elsewhere: every expert becomes m copies. Alone they would tie, and a token would go to copies of one expert. So
             when they wake, copy number a of every expert gets the same vector d_a added to its row of the router, where the
             d_a sum to zero. A token then goes to copies of one number, that of the largest d_a x, and among those the order is
             the base's. Weights that are a softmax do not see what all chosen scores have in common.

Worked example of the second, 4 experts that become 8, k = 2. The base scores a token (1.0, 0.4, 0.9, -0.2) and takes experts 0
and 2 with the weights (0.52, 0.48). With d x = 3 the copies score (4.0, 3.4, 3.9, 2.8) and (-2.0, -2.6, -2.1, -3.2): the token goes
to the first copies of experts 0 and 2, again with (0.52, 0.48). With d x = 0.1 the order is 1.1 and 1.0 for the copies of experts 0
and 2, then 0.9 for the second copy of expert 0: this token keeps its experts too. With d x = 0.02 it goes to both copies of
expert 0. So the loss moves by what tokens near the hyperplane d x = 0 lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from torch import Tensor, nn

from ..errors import Fault, raise_faults
from ..models.names import Kind, named_tensors, unique_tensors
from ..rules.axes import Axis
from ..rules.products import Factor
from .plan import Plan
from .tensor_plan import TensorPlan

NEVER_CHOSEN = -10_000
"""What is added to the score of an expert that sleeps: scores are at most 1 and trained biases below 100, and float16
holds it."""
ADMITTED_BY_BIAS = "they are copies of trained experts, and no token goes to them before you raise their bias"
"""What is said of new experts that sleep where everything else wakes."""
ExpertsWay = Literal["asleep", "apart"]


def more_experts_plan(base: nn.Module, wide: nn.Module, experts: tuple[int, int], groups: int = 1) -> Plan:
    """Plan the growth of a mixture to one with more experts and the same number for each token. Nothing has proved the plan yet.

    Args:
        base: The mixture.
        wide: The same with more experts.
        experts: How many experts there are, before and after.
        groups: How many groups they stand in, each of which gets as many more.

    Returns:
        The plan. New experts sleep where the router has a bias that can leave them out, and are copies otherwise.

    Raises:
        MupscaleError: If the two models differ in more than the experts, or their numbers cannot be reached.

    >>> def mixture(experts: int) -> nn.Module:
    ...     model = nn.Module()
    ...     model.router, model.down = nn.Linear(3, experts, bias=False), nn.Parameter(Tensor(experts, 3, 5))
    ...     return model
    >>> plan = more_experts_plan(mixture(4), mixture(8), (4, 8))
    >>> str(plan["down"].axes[0]), str(plan["down"].change.s), str(plan["down"].change.r), plan["down"].chosen
    ('out: 4x2', '1', '1/2', 0)
    """
    old = {name: tensor for name, _, tensor in named_tensors(base)}
    new, ties = unique_tensors(wide)
    grown = {name: _grown(old.get(name), tensor, experts) for name, (_, tensor) in new.items()}
    faults = [
        Fault(
            "experts.not_just_experts",
            name,
            f"{tuple(tensor.shape)} with more experts, {tuple(old[name].shape) if name in old else 'nothing'} without",
        )
        for name, (_, tensor) in new.items()
        if grown[name] is None
    ]
    faults += [
        Fault("model.tensor_only_in_base", name, "in the base only")
        for name in old.keys() - new.keys() - ties.keys()
    ]
    raise_faults("more experts change this model otherwise than by one dimension of its tensors", faults[:4])
    biases = {n for n, (kind, t) in new.items() if grown[n] == 0 and t.dim() == 1 and _is_untrained(kind, t)}
    way: ExpertsWay = "asleep" if biases else "apart"
    if way == "apart" and experts[1] % experts[0]:
        what = f"{experts[0]} -> {experts[1]}: this router has no bias that could leave new experts out, and copies come whole"
        remedy = _nearest(experts, experts[0])
        raise_faults(
            "this model cannot get more experts like that",
            [Fault("experts.not_whole", "experts", what, remedy)],
        )
    if way == "asleep" and (experts[0] % groups or experts[1] % groups):
        what = (
            f"{experts[0]} -> {experts[1]}: experts stand in {groups} groups, each of which gets as many more"
        )
        remedy = _nearest(experts, groups)
        raise_faults(
            "this model cannot get more experts like that",
            [Fault("experts.groups_not_whole", "experts", what, remedy)],
        )
    tensors = {}
    for name, (kind, tensor) in new.items():
        dim = grown[name]
        axes = [Axis.fixed(n) for n in tensor.shape]
        if dim is None or dim < 0:
            tensors[name] = TensorPlan((name,), tuple(axes), kind=kind)
            continue
        axes[dim] = _asleep_axis(experts, groups) if way == "asleep" else _copies_axis(experts)
        tensors[name] = TensorPlan(
            (name,),
            tuple(axes),
            kind=kind,
            pad=NEVER_CHOSEN if name in biases else 0,
            rows="experts" if way == "asleep" else None,
            chosen=dim if way == "apart" else None,
        )
    if way == "apart":
        _refuse_two_routers(tensors)
    return Plan(tensors, ties)


def scores_experts(name: str, entry: TensorPlan) -> bool:
    """Whether a tensor is read as a router: a matrix of which one dimension counts experts, and which is not called a bias."""
    matrix = entry.kind == "parameter" and len(entry.axes) == 2
    return entry.chosen is not None and matrix and not name.endswith("bias")


def _refuse_two_routers(tensors: Mapping[str, TensorPlan]) -> None:
    """Raise where a matrix beside the stacked weights of experts may be a bias: the router stands elsewhere, or there are two.

    Both are parameters with a row for each expert. Vectors that part copies would go into both.
    """
    scores = [name for name, entry in tensors.items() if scores_experts(name, entry)]
    stacks = {_owner(n) for n, entry in tensors.items() if entry.chosen is not None and len(entry.axes) > 2}
    what = "a matrix with a row for each expert beside their weights, and another one may be the router"
    remedy = "if it is a bias of the experts, end its name in bias; if it is their router, make it an nn.Linear of its own"
    faults = []
    for owner in stacks:
        beside = [name for name in scores if _owner(name) == owner]
        inside = [name for name in scores if name.startswith(owner and f"{owner}.") and name not in beside]
        near = _mixture_of(owner, stacks)
        around = [
            name
            for name in scores
            if (own := _owner(name)) not in stacks and (_is_in(name, near) or _is_in(owner, _owner(own)))
        ]
        if beside and (inside or around or len(beside) > 1):
            faults += [Fault("experts.bias_or_router", name, what, remedy) for name in beside]
    raise_faults("this model cannot get more experts like that", faults)


def _mixture_of(owner: str, stacks: Set[str]) -> str:
    """The largest module around stacked weights that holds those of no other mixture.

    >>> _mixture_of("layers.0.moe.experts.bank", {"layers.0.moe.experts.bank", "layers.1.moe.experts.bank"})
    'layers.0'
    """
    near = _owner(owner) or owner
    others = [other for other in stacks if not _is_in(other, near)]
    while near and not any(_is_in(other, _owner(near)) for other in others):
        near = _owner(near)
    return near


def _is_in(name: str, module: str) -> bool:
    """Whether a module holds what has this name, or is it; all modules are in the one without a name."""
    return f"{name}.".startswith(module and f"{module}.")


def _owner(name: str) -> str:
    """The module that holds a tensor, or the module that holds a module."""
    return name.rpartition(".")[0]


def _nearest(experts: tuple[int, int], apart: int) -> str:
    """The numbers next to the one that is asked for, where those that can be had lie so far apart.

    >>> _nearest((4, 6), 4), _nearest((4, 10), 4)
    ('write experts=8', 'write experts=8 or experts=12')
    """
    fewer = experts[0] + (experts[1] - experts[0]) // apart * apart
    found = [number for number in (fewer, fewer + apart) if number > experts[0]]
    return "write " + " or ".join(f"experts={number}" for number in found)


def _grown(old: Tensor | None, new: Tensor, experts: tuple[int, int]) -> int | None:
    """The dimension of a tensor that counts experts, -1 if it has none, None if it differs by anything else."""
    if old is None or old.dim() != new.dim():
        return None
    pairs = list(zip(old.shape, new.shape, strict=True))
    found = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    if not found:
        return -1
    return found[0] if [pairs[dim] for dim in found] == [experts] else None


def _is_untrained(kind: Kind, tensor: Tensor) -> bool:
    return kind == "buffer" or not tensor.requires_grad


def _asleep_axis(experts: tuple[int, int], groups: int) -> Axis:
    """The axis of experts that get zeros behind them, in every group.

    >>> str(_asleep_axis((4, 6), 1)), str(_asleep_axis((8, 12), 2))
    ('4+2', '2 * 4+2')
    """
    own, after = (number // groups for number in experts)
    inner = Factor(own, Fraction(1), after - own)
    return Axis.of((inner,) if groups == 1 else (Factor(groups, Fraction(1), 0), inner))


def _copies_axis(experts: tuple[int, int]) -> Axis:
    return Axis.parse(f"out: {experts[0]}x{experts[1] // experts[0]}")


def without_experts(entry: TensorPlan) -> TensorPlan:
    """The entry of a plan that begins where the new experts are there already.

    >>> entry = TensorPlan(("w",), (_copies_axis((4, 8)), Axis.fixed(3)), chosen=0)
    >>> [str(axis) for axis in without_experts(entry).axes], without_experts(entry).chosen
    (['8', '3'], None)
    """
    axes = tuple(Axis.fixed(a.wide) if dim == entry.chosen else a for dim, a in enumerate(entry.axes))
    return replace(entry, pad=0, axes=axes, chosen=None)


def refuse_equal_scores(plan: Plan) -> None:
    """Raise where copies of an expert would have one score each for as few places as before: a token would go to both.

    Only waking parts them, so there is nothing to grow to.
    """
    if plan.parts_tokens:
        remedy = "use upscale, or noise=mu.NewUnits() where a checkpoint is grown or loaded"
        raise_faults("this growth has no exact form that sleeps", [equal_scores("experts", remedy)])


def equal_scores(where: str, remedy: str) -> Fault:
    """The fault of experts whose copies have one score."""
    what = "copies of an expert would have one score, so tokens would go to several copies of one expert"
    return Fault("experts.equal_scores", where, what, remedy)
