"""A checkpoint of Megatron in, a wider one out, streamed, with the state of its optimizer. Megatron is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import Fault, MupscaleError
from ...jobs.job import Move
from ...noise.kinds import Noise
from ...optimizers.read import Names
from ...plans.ends import expect_exact
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...runs.growth_record import NAME
from ...storage.location import Location, location
from ...storage.looking import exists
from ..common import Growing, WideFiles, write_grown
from .fsdp_dtensor import is_fsdp_dtensor, read_fsdp_dtensor
from .groups import grown_before, stored_groups
from .grow_fsdp import endings_of, weights_of, wide_fsdp
from .grow_torch_dist import wide_torch_dist
from .parts import spots_of, weight_parts
from .torch_dist import read_torch_dist

Opened = tuple[Location, list[Move], Callable[[Growing], WideFiles]]
"""The folder of the base, the moves of its weights, and what makes the wide files."""


def grow_megatron_checkpoint(
    base: Location | str,
    out: Location | str,
    *,
    plan: Plan,
    noise: Noise | None = None,
    seed: int = 0,
    optimizer_class: str | None = None,
    names: Names | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, str]:
    """Write the checkpoint from which a wide Megatron job continues.

    Weights, their float32 copies, first and second moments are grown tensor by tensor, each in its units. Build the wide optimizer
    with `config_overrides=megatron_overrides(out)`, and load with Megatron's own loader. A run that was stopped is resumed by the
    same call.

    Args:
        base: A folder with `latest_checkpointed_iteration.txt`, or the folder of one iteration, in the format torch_dist or
            fsdp_dtensor.
        out: The folder to write.
        plan: The plan from the base's `GPTModel` on one rank to the wide one.
        noise: What parts copies or wakes new units. Without it the result trains exactly like the base.
        seed: The number on which the noise depends.
        optimizer_class: The class of the optimizer, "torch.optim.AdamW", where what it keeps does not tell.
        names: The parameters' names group by group, where groups of torch_dist are not by Megatron's own rule.
        prove: False grows by a plan that nothing has proved.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        What was not carried, with the reason of each.

    Raises:
        MupscaleError: If it is no such checkpoint, the plan is not proved, or does not fit it.

    >>> import tempfile, torch, mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: torch.nn.Linear(n, n), 2, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         grow_megatron_checkpoint(folder, f"{folder}/wide", plan=plan)
    ...     except mu.MupscaleError as error:
    ...         print(error.code)
    megatron.no_metadata
    """
    expect_exact(plan, prove, noise)
    growing = Growing(plan, optimizer=optimizer_class, names=names, rules=rules)
    path, moves, make = (_open_fsdp if is_fsdp_dtensor(base) else _open_torch_dist)(base, plan)
    record = _record(location(base))
    if noise is not None and record is None and grown_before(stored_groups(base)):
        what = "it was grown before, and the sizes of noise are those of its first base, which no mupscale.json next to it tells"
        remedy = "copy mupscale.json of the folder that grow_checkpoint wrote into this one"
        raise MupscaleError(
            "this checkpoint cannot get noise", [Fault("noise.first_base_unknown", str(base), what, remedy)]
        )
    return write_grown(path, out, growing, noise, seed, weights=moves, make=make, record=record or path)


def _record(base: Location) -> Location | None:
    """The folder that says how a checkpoint was grown: the one that is named, or that of an iteration's run."""
    folders = (base, base.parent) if base.name.startswith("iter_") else (base,)
    return next((folder for folder in folders if exists(folder / NAME)), None)


def _open_torch_dist(base: Location | str, plan: Plan) -> Opened:
    checkpoint = read_torch_dist(base)
    spots = spots_of(checkpoint, plan)
    weights = weight_parts(checkpoint, plan, spots)
    moves = [parts.move(name, plan[name].making(), parts.places[0]) for name, parts in weights.items()]
    return checkpoint.path, moves, lambda growing: wide_torch_dist(checkpoint, growing, spots, weights)


def _open_fsdp(base: Location | str, plan: Plan) -> Opened:
    checkpoint = read_fsdp_dtensor(base)
    endings = endings_of(checkpoint, plan)
    weights = weights_of(checkpoint, plan, endings)
    moves = [move for name, stored in weights.items() for move in stored.moves(name, plan[name].making())]
    return checkpoint.path, moves, lambda growing: wide_fsdp(checkpoint, growing, endings, weights)
