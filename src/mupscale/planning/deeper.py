"""New blocks in a model of one's own: which of their weights write into the stream, and whether they sleep and wake.

A module writes into the stream if its output has a gradient while its block is zero: the outputs of all others meet a
weight that is zero first. Whether that is right is not taken for granted: the gradient identity must hold with the block
asleep, and waking the block must not change the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Fault, MupscaleError, raise_faults
from ..models.build import Make
from ..models.dropout import without_dropout
from ..models.example_loss import Projection
from ..models.fingerprint import code_fingerprint
from ..models.float64 import lifted_casts, prepare
from ..models.names import named_tensors
from ..plans.direction import Direction
from ..plans.new_blocks import (
    NewBlocks,
    Order,
    block_plan,
    first_values,
    lists_of_blocks,
    nearest,
    new_in,
    order_of,
    spread_order,
)
from ..plans.plan import Plan
from ..plans.wide_model import fill_model_
from ..proofs.identity import (
    GRADIENT_TOLERANCE,
    Loss,
    compared,
    evaluated,
    keeping_buffers,
    loss_value,
)
from ..proofs.modes import measured_modes, mode_needs
from ..tensors.making import Fill
from ..tensors.random_states import forked
from .search.search import Found

SILENCED: Fill = "zero"
Orders = Mapping[str, Sequence[int | None]]
"""List of blocks -> their order, as in `plans/new_blocks.py`."""
_NO_KIND = ("training", "gradient_checkpointing")
LOUD = 10.0
"""How much larger the first gradient of a writer may be than that of a trained block. It is of the same size in the types of
`benchmarks/growth.py`. Behind a norm without a row it is far larger, because a norm blows up an output of nearly zero."""


def deeper_plan(base: Make, wide: Make, loss: Loss, orders: Orders, fresh: Make | None = None) -> Found:
    """The plan from a model to one with new blocks, both of one width, measured with `loss`.

    What new vectors hold is seen in `fresh`, by default the wide model itself, which must have weights then.
    """
    with forked(*(given for given in (base, wide) if isinstance(given, nn.Module))):
        models = [given if isinstance(given, nn.Module) else given() for given in (base, wide)]
        seen = models[1] if fresh is None else fresh if isinstance(fresh, nn.Module) else fresh()
    name, order = _order(orders, *models)
    if any(parameter.is_meta for model in (models[0], seen) for parameter in model.parameters()):
        raise MupscaleError(
            "order= needs models with weights; pass functions that build them, without on_meta",
            code="model.on_meta_device",
        )
    values = first_values(seen)
    with lifted_casts(models[0]):
        pair = prepare(*models)
        with without_dropout(*pair) as observed:
            plan = _found(*pair, name, order, values, loss)
            worst = check_asleep(*pair, plan, loss, "order")
            modes = measured_modes(lambda: compared(*pair, plan, loss).deviation, loss, *pair)
            wake_(pair[1], plan)
            check_woken(*pair, plan, loss, "order")
    plan = replace(
        plan,
        needs=plan.needs | observed.needs | mode_needs(modes),
        proof="outputs" if isinstance(loss, Projection) else "loss",
        code=code_fingerprint(*models),
    )
    return Found(plan, 1, worst, 0.0, (), modes=modes)


def more_blocks(base: nn.Module, wide: nn.Module) -> list[tuple[str, int, int]]:
    """Lists with more blocks in the wide model, with the numbers of their blocks in both.

    Layers of an `nn.Sequential` that differ, or that have no weights between them, are no blocks.
    """
    found = [lists_of_blocks(name for name, _, _ in named_tensors(model)) for model in (base, wide)]
    more = []
    for name, deep in found[1].items():
        blocks = found[0].get(name, {})
        alike = {*map(frozenset, deep.values())} <= {*map(frozenset, blocks.values())}
        numbered = all(set(of) == set(range(len(of))) for of in (blocks, deep))
        if name and len(deep) > len(blocks) and alike and numbered:
            more.append((name, len(blocks), len(deep)))
    return more


def missing_order(base: nn.Module, wide: nn.Module) -> list[Fault]:
    """A fault that names the order to write, where the wide model has new blocks and nothing measures them."""
    faults = []
    for name, layers, deeper in more_blocks(base, wide):
        what = f"the wide model has {deeper} blocks, the base {layers}, and nothing shows which of their weights write into the stream"
        remedy = f'write infer_plan(base, wide, loss=…, order={{"{name}": {list(order_of(layers, deeper))}}})'
        faults.append(Fault("depth.order_missing", name, what, remedy))
    return faults


def usual_order(base: nn.Module, wide: nn.Module) -> Orders | None:
    """Stack order, all blocks and then all blocks again; None unless one list has more blocks in the wide model.

    Where the wide model has another kind of block in a place, as one with other attention, new blocks stand behind those
    that they are like.
    """
    more = more_blocks(base, wide)
    if len(more) != 1:
        return None
    name, layers, deeper = more[0]
    order, blocks = order_of(layers, deeper), list(wide.get_submodule(name).children())
    if all(_alike(blocks, new, like) for new, like in enumerate(nearest(order)) if new != like):
        return {name: order}
    warnings.warn(
        f"{name}: in stack order new blocks would be like blocks of another kind than {type(wide).__name__} has in their "
        f"places; each stands behind the block that it is like: {list(found := spread_order(layers, deeper))}",
        stacklevel=4,
    )
    return {name: found}


def _kind(block: nn.Module) -> dict[tuple[str, str], object]:
    """What its class makes of a block: its modules, shapes, and settings that are whole numbers or words.

    Flags of frameworks and numbers with a fraction, as the share of dropout, are no kinds.
    """
    found: dict[tuple[str, str], object] = {
        (name, "shape"): tuple(tensor.shape) for name, _, tensor in named_tensors(block)
    }
    for path, module in block.named_modules():
        found[path, "class"] = type(module)
        plain = {k: v for k, v in vars(module).items() if k not in _NO_KIND and not k.startswith("_")}
        found |= {(path, k): v for k, v in plain.items() if isinstance(v, (bool, int, str))}
    return found


def _alike(blocks: Sequence[nn.Module], new: int, like: int) -> bool:
    """Whether two blocks are of one kind; a setting that is the number of its block may differ."""
    kinds = _kind(blocks[new]), _kind(blocks[like])
    return kinds[0].keys() == kinds[1].keys() and all(
        value == kinds[1][key] or (value, kinds[1][key]) == (new, like) for key, value in kinds[0].items()
    )


def _order(orders: Orders, base: nn.Module, wide: nn.Module) -> tuple[str, Order]:
    """The list of blocks and their order; refused unless they fit the two models."""
    if not isinstance(orders, Mapping) or len(orders) != 1:
        raise MupscaleError(
            'order= names one list of blocks, expected order={"blocks": [0, None, 1]}',
            code="depth.order_not_one_list",
        )
    (name, given), faults = next(iter(orders.items())), []
    order = tuple(given)
    counts = [len(lists_of_blocks(n for n, _, _ in named_tensors(m)).get(name, ())) for m in (base, wide)]
    old = [order[i] for i in range(len(order)) if i not in new_in(order)]
    if old != list(range(counts[0])) or len(order) != counts[1] or len(old) == len(order):
        what = f"{list(order)} for {counts[0]} blocks in the base and {counts[1]} in the wide model"
        remedy = "name every block of the base in order; a new one is None, or the number of an earlier block that it is like"
        faults.append(Fault("depth.order_does_not_fit", f"order, {name}", what, remedy))
    shapes = [{n: tuple(t.shape) for n, _, t in named_tensors(m)} for m in (base, wide)]
    wider = [n for n in shapes[0] if not n.startswith(f"{name}.") and shapes[0][n] != shapes[1].get(n)]
    if wider:
        what = f"{shapes[0][wider[0]]} in the base, {shapes[1].get(wider[0])} in the wide model: order= grows deeper alone"
        remedy = "plan in two steps: infer_plan(base, deeper, loss=…, order=…).then(infer_plan(deeper, wide, loss=…))"
        faults.append(Fault("depth.width_grows_too", wider[0], what, remedy))
    raise_faults("this order does not fit the two models", faults)
    return name, order


def _found(
    base: nn.Module, deep: nn.Module, blocks: str, order: Order, values: Mapping[str, Fill], loss: Loss
) -> Plan:
    """The plan with the writers that were found. Norms that write are silenced first: they hide what is before them."""
    new = NewBlocks(values, ())
    plan = block_plan(base, deep, order, new)
    fill_model_(deep, base, Direction(plan), in_place=True)
    writers = _writers(deep, plan, loss)
    gains = {name: SILENCED for name in writers if plan[name].fill == "one"}
    if gains:
        new = NewBlocks(values, tuple(gains), gains)
        fill_model_(deep, base, Direction(block_plan(base, deep, order, new)), in_place=True)
        writers = [name for name in _writers(deep, plan, loss) if name not in gains]
    else:
        new = replace(new, quiet=tuple(name for name in writers if len(plan[name].axes) > 1))
    if not new.quiet and (gates := _gates(base, deep, order, values, loss)):
        plan = block_plan(base, deep, order, NewBlocks(values, gates, dict.fromkeys(gates, SILENCED)))
        fill_model_(deep, base, Direction(plan), in_place=True)
        return plan
    if not new.quiet:
        what = "which weights of a new block write into its stream was not found"
        raise_faults("this model cannot grow deeper", [Fault("depth.writers_not_found", blocks, what)])
    vectors = (name for name in writers if len(plan[name].axes) < 2)
    # The same bias in every block: what follows the number of the block.
    rests = dict.fromkeys(name.removeprefix(f"{blocks}.").partition(".")[2] for name in vectors)
    return block_plan(base, deep, order, replace(new, biases=tuple(f"{blocks}.*.{rest}" for rest in rests)))


def _gates(
    base: nn.Module, deep: nn.Module, order: Order, values: Mapping[str, Fill], loss: Loss
) -> list[str]:
    """New vectors and numbers of one's own that silence their branch, as LayerScale's and ReZero's: zero, with a gradient.

    They are found with the rest of their block awake. Asleep the block is zero as well, so that no gradient reaches either.
    """
    plan = block_plan(base, deep, order, NewBlocks(values, ()))
    own = [
        name
        for name, entry in plan.tensors.items()
        if entry.new
        and entry.kind == "parameter"
        and len(entry.axes) < 2
        and not type(deep.get_submodule(name.rpartition(".")[0])).__module__.startswith("torch.")
    ]
    if not own:
        return []
    plan = block_plan(base, deep, order, NewBlocks(values, own, dict.fromkeys(own, SILENCED)))
    fill_model_(deep, base, Direction(plan), in_place=True)
    wake_(deep, plan)
    grads = evaluated(deep, loss).grads
    return [name for name in own if (grad := grads.get(name)) is not None and bool(grad.any())]


def _writers(deep: nn.Module, plan: Plan, loss: Loss) -> list[str]:
    """New weights that write into the stream: those of modules whose output has a gradient while their block is zero."""
    outputs: list[tuple[list[str], Tensor]] = []

    def keep(names: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            of = output if isinstance(output, (tuple, list)) else [output]
            outputs.extend((names, t) for t in of if isinstance(t, Tensor) and t.requires_grad)

        return hook

    handles = []
    for path, module in deep.named_modules():
        # torch's attention applies the weights of its last layer without calling it.
        owner = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
        start = f"{path}.out_proj." if owner is not module else f"{path}."
        names = [start + leaf for leaf, _ in owner.named_parameters(recurse=False)]
        if names := [name for name in names if name in plan and plan[name].new]:
            handles.append(module.register_forward_hook(keep(names)))
    try:
        with forked(deep, seed=0), keeping_buffers(deep), torch.enable_grad():
            value = loss_value(deep, loss)
            found = torch.autograd.grad(value, [t for _, t in outputs], allow_unused=True) if outputs else ()
    finally:
        for handle in handles:
            handle.remove()
    written = [
        names for (names, _), grad in zip(outputs, found, strict=True) if grad is not None and grad.any()
    ]
    return list(dict.fromkeys(name for names in written for name in names))


def check_asleep(
    base: nn.Module, deep: nn.Module, plan: Plan, loss: Loss, where: str, remedy: str = ""
) -> float:
    """The worst gradient error; raises unless the deeper model has the base's loss, and no gradient reaches what is new."""
    found = compared(base, deep, plan, loss)
    errors = found.identity.errors
    claim = "this model cannot grow deeper exactly"
    if not found.agrees:
        what = "a new block does not pass its input on, as where a norm follows the sum"
        raise_faults(claim, [Fault("depth.block_changes_output", where, what, remedy)])
    wrong = [name for name, error in errors.items() if not error <= GRADIENT_TOLERANCE]
    awake = [name for name in wrong if plan[name].new]
    faults = [
        Fault("depth.new_part_awake", name, "new, and training would move it before it wakes", remedy)
        for name in awake
    ]
    faults += [
        Fault("depth.gradient_differs", n, "its gradient differs in the deeper model", remedy)
        for n in wrong
        if not awake
    ]
    raise_faults(claim, faults[:4])
    return max(errors.values(), default=0.0)


def wake_(deep: nn.Module, plan: Plan) -> None:
    """Give the new weights that are to wake random values of a usual size."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in deep.named_parameters():
            entry = plan[name]
            if entry.new and not entry.quiet and parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device="cpu")
                parameter.copy_(noise / parameter[0].numel() ** 0.5)


def check_woken(
    base: nn.Module, deep: nn.Module, plan: Plan, loss: Loss, where: str, remedy: str = ""
) -> None:
    """Raise unless the woken model has the base's loss, and its writers have gradients, none of them far above usual."""
    found = compared(base, deep, plan, loss)
    if not found.agrees:
        what = f"waking a new block changes the loss by {found.gap:.1e}, expected 0"
        raise_faults(
            "this model cannot grow deeper", [Fault("depth.waking_changes_loss", where, what, remedy)]
        )
    faults = []
    for name, entry in plan.tensors.items():
        if entry.quiet and entry.like is not None:
            old = found.wide.grads[plan.sources[entry.like][0]]
            size, usual = (
                0.0 if grad is None else float(grad.norm()) for grad in (found.wide.grads[name], old)
            )
            # The gradient of a gate is the output of its branch, which the random readers of this trial make larger.
            most = LOUD if len(entry.axes) > 1 else LOUD**2
            if not 0 < size <= most * usual:
                what = f"its gradient is {size:.1e} when the block wakes, that of {entry.like} is {usual:.1e}"
                faults.append(Fault("depth.odd_waking_gradient", name, what, remedy))
    raise_faults("new blocks of this model do not wake quietly", faults[:2])
