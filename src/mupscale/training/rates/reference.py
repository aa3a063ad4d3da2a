"""The learning rate of an optimizer at the reference: set it, or read it and see that all groups still have one."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from ...arguments import wrong_kind, wrong_number
from ...errors import Fault, MupscaleError, raise_faults
from ...optimizers.rates import Rates, are_one


def set_lr_(optimizer: Optimizer, lr: float | Tensor) -> None:
    """Set the reference learning rate: every group gets this rate times its own factor.

    A scheduler that is built afterwards starts at this rate, even if an earlier scheduler left its `initial_lr`.

    Args:
        optimizer: An optimizer that was built from `param_groups`.
        lr: The learning rate, written at the reference.

    Raises:
        MupscaleError: If the optimizer's groups have no factors, or the rate is no number.

    >>> import torch, mupscale as mu
    >>> plan, model = mu.plans.plan_between(lambda n: torch.nn.Linear(n, n), 2, 4), torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=0.1))
    >>> set_lr_(optimizer, 0.2)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.1, 0.2]
    """
    faults = _wrong_optimizer(optimizer)
    if not isinstance(lr, Tensor):
        faults += wrong_number("lr", lr, "write set_lr_(optimizer, 1e-3), for example")
    raise_faults("no learning rate can be set", faults)
    _rates(optimizer).set_(lr)


def reference_lr(optimizer: Optimizer) -> float:
    """Read the learning rate that all groups share at the reference.

    Args:
        optimizer: An optimizer that was built from `param_groups`.

    Returns:
        The learning rate, written at the reference.

    Raises:
        MupscaleError: If the groups do not agree. The usual reason is a scheduler that writes one absolute rate into every group.

    >>> import torch, mupscale as mu
    >>> plan, model = mu.plans.plan_between(lambda n: torch.nn.Linear(n, n), 2, 4), torch.nn.Linear(4, 4)
    >>> reference_lr(torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=0.1)))
    0.1
    """
    raise_faults("the learning rate cannot be read", _wrong_optimizer(optimizer))
    rates = _rates(optimizer)
    found = rates.at_reference()
    if are_one(found):
        return found[0]
    rows = zip(rates.of_groups(), rates.factors, found, strict=True)
    raise MupscaleError(
        "the groups' learning rates are no longer one rate in different units",
        [
            Fault(
                "rates.no_single_reference",
                f"group {i}",
                f"lr = {lr:.6g}, factor {factor:.6g}, so reference lr {rate:.6g}",
                "use a scheduler that multiplies, or set_lr_",
            )
            for i, (lr, factor, rate) in enumerate(rows)
        ],
    )


def _rates(optimizer: Optimizer) -> Rates:
    if any("lr_factor" not in group for group in optimizer.param_groups):
        raise MupscaleError(
            "a group has no lr_factor; build the optimizer from mupscale.param_groups", code="rates.no_factor"
        )
    return Rates(optimizer)


def _wrong_optimizer(optimizer: object) -> list[Fault]:
    remedy = "hand over the optimizer that was built from param_groups"
    return wrong_kind("optimizer", optimizer, Optimizer, remedy)
