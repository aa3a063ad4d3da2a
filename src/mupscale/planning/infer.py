"""Infer a plan from two models: what grows, and, given a loss, how it is laid out.

Without a loss, only the types of modules and the declarations are used, and the plan says whether these decide it
(`Plan.proof`). With a loss or example inputs, a short list of hypotheses is tried on the two models in float64, and the
gradient identity decides. A plan that passes is exact for these models; one that does not pass is never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..arguments import shown, wrong_function, wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..models.build import Make, build
from ..models.dropout import without_dropout
from ..models.example_loss import ExampleInputs, Projection, refuse_unreached
from ..models.fingerprint import code_fingerprint
from ..models.float64 import lifted_casts, prepare
from ..models.kinds import KNOWN_NORMS, is_norm
from ..models.names import pattern_of
from ..models.need import Need
from ..plans.more_experts import more_experts_plan
from ..plans.plan import Plan, Proof
from ..proofs.identity import Evaluated, Loss, compared, evaluated
from ..proofs.modes import measured_modes, mode_needs
from ..rules.axes import nearest_copies
from ..rules.products import COPIES, By, Ways
from ..rules.scale import Scale
from ..tensors.random_states import forked
from .awake import cut_for_waking, with_split_stacks
from .declare import Declared, declare, sound
from .deeper import Orders, deeper_plan, missing_order, usual_order
from .draft import Draft, draft
from .facts.decided import why_undecided
from .facts.modules import dropout_of_modules, leaking_pads, row_of
from .facts.padded_norms import centred_sizes, padded_norms, streams_by_size, unpaddable, with_streams
from .facts.unwritten import reading_faults
from .knobs import copies, layout_knobs
from .search.likely import likely_plan
from .search.not_found import NoPlanError, Sizes
from .search.search import Found, search

_UNDECLARED = Declared()
_MEASURE = "pass loss= or example_inputs=, and the gradient identity decides"


def infer_plan(
    base: Make,
    wide: Make,
    *,
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    declared: Declared | None = None,
    by: By = "copies",
    order: Orders | None = None,
    experts: Sequence[int] | None = None,
    groups: int = 1,
) -> Plan:
    """Find the plan from a model to a larger one; with a loss, the plan is measured and exact for these models.

    Axes that differ in size grow. Where the larger model has more blocks in a list, and one width with the base, the new blocks are
    in stack order: all blocks of the base, then all of them again. They sleep until they are woken.

    Args:
        base: The model to grow from, or a function without arguments that builds it.
        wide: The larger model, or a function without arguments that builds it.
        loss: `loss(model)`, your loss on one fixed batch. It decides layouts that shapes leave open and proves the plan, by the
            gradients of both models in the mode the model is in, train or eval, and then in the other.
        example_inputs: One batch for `forward`, a tuple or a dict, which does the same by a projection of the outputs.
        declared: What shapes do not show, such as the blocks in which an axis is laid out.
        by: "copies" copies every unit. "units" adds new units, zeros behind those of the base, at any size; a space that cannot
            have zeros grows by copies in the same plan. "padded" makes copies, and zeros where no whole number of copies fits.
        order: Where new blocks stand, as `{"blocks": [0, None, 1]}`: for each block of the list `blocks`, the number of the
            block of the base that it is. A new one is None, or the number of an earlier block that it is like. Needs a `loss`.
        experts: How many experts a mixture has, before and after, where each token goes to as few as before. New ones sleep where
            the router has a bias that can leave them out, and are copies otherwise. `upscale` measures such a plan.
        groups: In how many groups the experts stand, each of which gets as many more.

    Returns:
        The plan. Without `loss` and `example_inputs`, `plan.proved` says whether torch's own modules decide it; code of your own
        needs a measurement.

    Raises:
        NotExact: If no exact plan was found.
        Undecided: If shapes, declarations and loss leave it open.
        WrongArgument: If an argument cannot be used. These and all others are `MupscaleError`.

    >>> base = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> plan = infer_plan(base, lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> {name: str(tensor.change.s) for name, tensor in plan.tensors.items()}
    {'0.weight': '1', '0.bias': '1', '2.weight': '1/2', '2.bias': '1'}
    """
    checked = sound(declared)
    measure = measured_with(loss, example_inputs)
    number = _more(experts, groups)
    if number is not None:
        if measure is not None or order is not None or checked.any or by != "copies":
            what = "a plan for more experts follows from their number alone"
            remedy = "leave out loss, example_inputs, order, declared and by; pass the loss to upscale, and grow the width with a second plan"
            raise MupscaleError(
                "these experts cannot be planned", [Fault("experts.planned_alone", "experts", what, remedy)]
            )
        return more_experts_plan(_built(base, seed=0), _built(wide, seed=0), number, groups)
    if order is not None:
        if measure is None or checked.any or by != "copies":
            what = "new blocks are found by a measurement at one width"
            remedy = "pass loss= or example_inputs= and no declarations; grow the width with a second plan, and then()"
            raise MupscaleError(
                "this order cannot be planned", [Fault("depth.order_not_measured", "order", what, remedy)]
            )
        return deeper_plan(base, wide, measure, order).plan
    if measure is not None:
        return find_plan(base, wide, measure, checked, Ways(by)).plan
    return plan_of_shapes(base, wide, Ways(by), checked)


def _more(experts: Sequence[int] | None, groups: int) -> tuple[int, int] | None:
    """How many experts there are before and after; raises unless these are two numbers, and groups come with them."""
    faults = wrong_whole("groups", groups, least=1)
    if experts is None:
        if not faults and groups != 1:
            what = f"groups={groups} says how experts stand, and experts= does not say how many there are"
            remedy = f"write experts=({2 * groups}, {4 * groups}), groups={groups}, for example, or leave out groups"
            faults = [Fault("argument.groups_without_experts", "groups", what, remedy)]
        raise_faults("these experts cannot be planned", faults)
        return None
    pair = tuple(experts) if isinstance(experts, (tuple, list)) else ()
    if len(pair) != 2 or any(wrong_whole("experts", n, least=1) for n in pair) or pair[0] > pair[1]:
        found = repr(experts) if pair and all(isinstance(n, int) for n in pair) else shown(experts)
        what = f"it is {found}, expected two whole numbers: the experts before, and as many or more after"
        faults += [Fault("argument.not_two_numbers", "experts", what, "write experts=(4, 8), for example")]
    raise_faults("these experts cannot be planned", faults)
    return pair[0], pair[1]


def plan_of_shapes(base: Make, wide: Make, ways: Ways, declared: Declared = _UNDECLARED) -> Plan:
    """The plan that modules and declarations decide, without a measurement; raises if they do not."""
    made, _ = _opened(base, wide, declared, ways)
    raise_faults("a plan needs more than the shapes of these two models", _undecided(made))
    plan = with_streams(made, streams_by_size(made)).plan()
    # Layouts that were declared are compared with what modules write and read; nothing checks the rest.
    by_hand = declared.roles or declared.folds or declared.plus_one
    proof: Proof = "none" if by_hand or why_undecided(*made.models, plan) else "modules"
    return replace(plan, proof=proof, needs=plan.needs | dropout_of_modules(made.models[0]))


def guessed_plan(
    base: Make, wide: nn.Module, loss: Loss, ways: Ways, declared: Declared = _UNDECLARED
) -> Plan:
    """The likeliest plan, from modules and from the calls of one forward of each model; the wide model is written over."""
    made, models = _opened(base, wide, declared, ways, measured=True)
    return likely_plan(made, *models, loss)


def plan_between(
    make: Callable[[Any], nn.Module],
    base: Any,
    wide: Any,
    *,
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    declared: Declared | None = None,
    by: By = "copies",
    order: Orders | None = None,
) -> Plan:
    """Find the plan from one size of a factory to another; otherwise as `infer_plan`.

    Args:
        make: A function of a size that builds the model.
        base: The size to grow from; `make(base)` is the base.
        wide: The size to grow to; `make(wide)` is the larger model.
        loss: `loss(model)`, your loss on one fixed batch, which decides what shapes leave open and proves the plan.
        example_inputs: One batch for `forward`, a tuple or a dict, in place of `loss`.
        declared: What shapes do not show, such as the blocks in which an axis is laid out.
        by: "copies", "units" or "padded": how widths grow.
        order: Where new blocks stand, by the name of their list.

    Returns:
        The plan. `plan.proved` says whether it is known to be exact.

    Raises:
        MupscaleError: If `make` is no function of a size, and as for `infer_plan`.

    >>> plan = plan_between(lambda n: nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2)), 4, 8)
    >>> plan["2.weight"].wide_shape, str(plan["2.weight"].change.s)
    ((2, 8), '1/2')
    """
    raise_faults("no model can be built from a size", wrong_function("make", make, "size"))
    return infer_plan(
        lambda: make(base),
        lambda: make(wide),
        loss=loss,
        example_inputs=example_inputs,
        declared=declared,
        by=by,
        order=order,
    )


def measured_with(loss: Loss | None, example_inputs: ExampleInputs | None) -> Loss | None:
    """What a plan is measured with: the loss, or a projection of the outputs on the example inputs; None for neither."""
    if loss is not None and example_inputs is not None:
        raise MupscaleError(
            "loss= and example_inputs= are two ways to measure a plan; leave one out: loss= shows more",
            code="argument.loss_and_inputs",
        )
    if loss is not None:
        raise_faults("a plan cannot be measured", wrong_function("loss", loss, "model"))
    return loss if example_inputs is None else Projection(example_inputs)


def find_plan(
    base: Make,
    wide: Make,
    loss: Loss,
    declared: Declared,
    ways: Ways = COPIES,
    seconds: float | None = None,
    both_modes: bool = True,
    fresh: Make | None = None,
) -> Found:
    """The plan that passes the gradient identity of `loss`, with what the search measured on its way.

    Where the wide model has more blocks, `fresh` shows what vectors of a fresh one hold; by default it is `wide` itself.

    The plan that was found is measured once more in the other mode, train or eval, unless `both_modes` is false. Where no
    plan by new units is exact, the spaces at fault grow by copies.
    """
    waking, given, before = ways.by == "units", declared, None
    while True:
        try:
            return _found(base, wide, loss, declared, ways, seconds, both_modes, waking)
        except MupscaleError as error:
            if error.code == "depth.order_missing" and not declared.any:
                if (deeper := _deeper(base, wide, loss, fresh)) is not None:
                    return deeper
                raise
            if isinstance(error, NoPlanError) and error.roles:
                declared = replace(declared, roles=error.roles)
                continue
            turned, declared = declared is not given, given
            if turned and ways is COPIES:
                waking = False
                continue
            if ways is COPIES and before is not None:
                raise before from None
            if ways.by != "units" or not isinstance(error, NoPlanError):
                raise
            if error.centred - ways.copied:
                # A space whose norms subtract the mean grows by copies where its new channels cannot carry the mean.
                raise_faults(
                    "these sizes can grow neither by new units nor by copies",
                    _not_whole(error, error.centred),
                )
                ways = replace(ways, copied=ways.copied | error.centred)
                continue
            sizes = ways.copied | error.sizes
            raise_faults("these sizes can grow neither by new units nor by copies", _not_whole(error, sizes))
            # Where no space shows that zeros do not pass through it, all of them grow by copies.
            more = replace(ways, copied=sizes)
            if error.code == "search.new_units_never_learn" and not error.sizes <= ways.copied_blocks:
                # Heads in which zeros meet zeros; single units of the same sizes may still have zeros.
                more = replace(ways, copied_blocks=ways.copied_blocks | error.sizes)
            ways, before = more if more != ways else COPIES, error


def _deeper(base: Make, wide: Make, loss: Loss, fresh: Make | None) -> Found | None:
    """The plan of a wide model that has more blocks, in the usual order; None where more than one list has."""
    orders = usual_order(_built(base, seed=0), _built(wide, seed=0))
    return None if orders is None else deeper_plan(base, wide, loss, orders, fresh)


def _not_whole(error: NoPlanError, sizes: Sizes) -> list[Fault]:
    """Why new units are not possible, if the sizes at which they are not do not grow by whole copies either."""
    faults = [
        Fault(
            "axis.not_whole_copies",
            f"{base} -> {wide}",
            "new units are not possible here, and this is not a whole number of copies",
            f"nearest: {nearest_copies(base, wide)}",
        )
        for base, wide in sorted(sizes)
        if wide % base
    ]
    why = error.faults or (Fault(error.code, "new units", error.claim),)
    return [*why, *faults] if faults else []


def _found(
    base: Make,
    wide: Make,
    loss: Loss,
    declared: Declared,
    ways: Ways,
    seconds: float | None,
    both_modes: bool,
    waking: bool,
) -> Found:
    made, models = _opened(base, wide, declared, ways, measured=True)
    centred = centred_sizes(made)
    if not isinstance(base, nn.Module):
        with forked():
            models = (base(), models[1])
    with lifted_casts(models[0]):
        pair = prepare(*models)
        with without_dropout(*pair) as observed:
            try:
                found = search(made, *pair, loss, seconds)
            except NoPlanError as error:
                error.centred = error.centred or centred
                raise
            # The wide model holds the plan that was found: it was tried last.
            modes = (
                measured_modes(lambda: compared(*pair, found.plan, loss).deviation, loss, *pair)
                if both_modes
                else {}
            )
    plan, unlearned = found.plan, Sizes()

    def measured(model: nn.Module, wanted: Callable[[float], bool]) -> Evaluated:
        with lifted_casts(models[0]), without_dropout(*pair):
            return evaluated(model, loss, wanted)

    if waking:
        try:
            plan, unlearned = cut_for_waking(plan, *pair, measured)
        except NoPlanError as error:
            if not declared.roles:
                two = [made.entries[name] for name in found.assumed]
                error.roles = {e.name: {e.growing[0]: "in", e.growing[1]: "out"} for e in two}
            error.centred = centred
            if ways.by == "units" or error.roles:
                raise
            # A plan of copies is exact asleep; who wakes it looks at the loss.
    plan = with_split_stacks(plan, *pair, measured)
    plan = replace(plan, needs=plan.needs | observed.needs | mode_needs(modes))
    proved = proved_by(plan, loss, found.unreached, *models)
    return replace(found, plan=proved, modes=modes, unlearned=unlearned)


def proved_by(plan: Plan, loss: Loss, unreached: tuple[str, ...], *models: nn.Module) -> Plan:
    """The plan after its gradients were measured on two models; raises if example inputs leave a growing tensor out."""
    plan = replace(plan, code=code_fingerprint(*models))
    growing = {name for entry in plan.tensors.values() if entry.grows for name in entry.sources}
    if isinstance(loss, Projection):
        refuse_unreached(unreached, growing)
        return replace(plan, proof="outputs")
    tested = {pattern_of(name) for name in growing - set(unreached)}
    untested = dict.fromkeys(pattern_of(name) for name in unreached if name in growing)
    names = ", ".join(pattern for pattern in untested if pattern not in tested)
    need = Need(
        f"a loss that reaches every tensor ({names}): no gradient reaches it, so nothing tests how it grows",
        "unreached",
    )
    return replace(plan, proof="loss", needs=plan.needs | ({need} if names else set()))


def _opened(
    base: Make, wide: Make, declared: Declared, ways: Ways, measured: bool = False
) -> tuple[Draft, tuple[nn.Module, nn.Module]]:
    """The draft with the roles of modules and all declarations, and the two models it was made from."""
    faults: list[Fault] = []
    sides: tuple[tuple[str, Any], ...] = (("base", base), ("wide", wide))
    for word, given in sides:
        if not isinstance(given, nn.Module) and not callable(given):
            what = f"it is {shown(given)}, expected a module, or a function without arguments that builds one"
            faults.append(
                Fault(
                    "argument.not_a_model",
                    word,
                    what,
                    "write infer_plan(base, wide), or plan_between(make, 64, 256) for widths",
                )
            )
    raise_faults("a plan needs two models", faults)
    models = (_built(base, seed=0), _built(wide, seed=0))
    raise_faults("the wide model has new blocks", missing_order(*models))
    # Built twice from two seeds, buffers that are drawn at random differ; a module can be built only once.
    again = None if isinstance(base, nn.Module) else build(base, seed=1)
    made, faults = draft(*models, ways, again, measured)
    made, unused = declare(made, declared)
    if ways.by == "units" and (sizes := frozenset(unpaddable(made).values()) - ways.copied):
        # A norm that subtracts the mean of its space: such a space grows by copies, if its size is a whole number of them.
        stuck = {
            size: fault._replace(code="axis.not_whole_copies")
            for fault, size in unpaddable(made).items()
            if size in sizes and size[1] % size[0]
        }
        raise_faults("these sizes can grow neither by new units nor by copies", [*stuck.values()])
        return _opened(base, wide, declared, replace(ways, copied=ways.copied | sizes), measured)
    copied = {name for name, entry in made.entries.items() if entry.kind == "buffer" and entry.layouts}
    faults = [fault for fault in faults if fault.where not in copied] + unused
    raise_faults("these two models cannot be planned", faults)
    return made, models


def _built(given: Make, seed: int) -> nn.Module:
    return given if isinstance(given, nn.Module) else build(given, seed=seed)


def _undecided(made: Draft) -> list[Fault]:
    """Faults for everything that shapes leave open. None names a declaration: nothing was tried that could pass."""
    faults = []
    for name, entry in {pattern_of(entry.name): entry for entry in made.open}.items():
        code, what = "plan.unknown_role", "no known module says whether its growing axis is summed over"
        if isinstance(entry.module[0], (nn.Embedding, nn.EmbeddingBag)) and 0 in entry.growing:
            code = "plan.rows_grow"
            what = (
                f"its rows, which are not a width, grow from {entry.base_shape[0]} to {entry.wide_shape[0]}"
            )
        faults.append(Fault(code, name, what, _MEASURE))
    folds = [e.declared_fold for e in made.entries.values() if e.declared_fold is not None]
    for name, reader in made.conflicts.items():
        inverse = Scale.of(copies(made, made.entries[name], made.entries[name].growing[-1])) ** -1
        if made.entries[name].declared_fold is not None or inverse in folds:
            continue
        what = "a tied readout sums over the width, and its input use does not: a tensor must absorb 1/k"
        faults.append(Fault("plan.tied_readout", f"{name} = {reader}", what, _MEASURE))
    faults += reading_faults(made, _MEASURE)
    for path, module in made.models[0].named_modules():
        if row_of(module).features == "mixed":
            what = f"{type(module).__name__} mixes channels in a way that shapes do not show"
            faults.append(Fault("plan.mixes_channels", path, what, _MEASURE))
    faults += _undecided_pads(made)
    decided = {(e.name, d) for e in made.entries.values() for d in e.layouts}
    for knob in layout_knobs(made):
        axes = [(n, d) for n, dims in knob[0].layouts.items() for d in dims] if knob else []
        if axes and not all(axis in decided for axis in axes):
            name, dim = axes[0]
            blocks = [next(iter(s.layouts[name].values())) for s in knob]
            what = f"undeclared layout: a number of heads or groups grows, so its copies may be neighbours or blocks (of {', '.join(map(str, blocks))})"
            faults.append(Fault("layout.undeclared", f"{pattern_of(name)}, axis {dim}", what, _MEASURE))
    return faults


def _undecided_pads(made: Draft) -> list[Fault]:
    """Zeros pass through activations that map 0 to 0; what a norm over them asks of other tensors is measured."""
    faults = list(unpaddable(made))
    # New units are zeros at every size, so another size would not help them.
    remedy = _MEASURE if made.ways.by == "units" else f"use whole multiples, or {_MEASURE}"
    padded = any(made.padded(entry, dim) for entry in made.entries.values() for dim in entry.growing)
    norms = {path: made.entries[gain].module[0] for path, gain in padded_norms(made).items()}
    if made.ways.pads and padded:
        faults += leaking_pads(made.models[0], remedy)
        modules = made.models[0].named_modules()
        norms |= {p: m for p, m in modules if is_norm(m) and not isinstance(m, KNOWN_NORMS)}
    refused = {fault.where for fault in faults}
    for path, norm in norms.items():
        if path not in refused:
            what = f"what writes into the space that {type(norm).__name__} averages over must absorb its share of zeros"
            faults.append(Fault("axis.padding_of_norm", path, what, remedy))
    return faults
