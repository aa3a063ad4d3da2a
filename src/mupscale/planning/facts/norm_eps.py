"""What zero padding requires of normalisation layers.

Zeros multiply a mean square by `filled`, the share of units that are not zero. RMSNorm can absorb this: if eps is
multiplied by it too, the norm's divisor is smaller by sqrt(filled), and a factor of sqrt(filled) in the gain
compensates. From 4 units to 6, filled is 2/3:

>>> import torch
>>> x, filled = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64), 2 / 3
>>> base, wide = nn.RMSNorm(4, eps=0.1).double(), nn.RMSNorm(6, eps=0.1 * filled).double()
>>> with torch.no_grad():
...     _ = wide.weight.mul_(filled**0.5)
>>> padded = torch.cat([x, x.new_zeros(2)])
>>> torch.allclose(wide(padded)[:4], base(x), rtol=1e-12)
True

LayerNorm cannot be padded: it subtracts the mean, which turns the zeros into something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from torch import nn

from ...errors import Fault
from ...models.names import strip_wrappers
from ...plans.plan import Edit
from ...plans.tensor_plan import TensorPlan
from ...rules.scale import Scale


def pad_norms(
    base: nn.Module, wide: nn.Module, tensors: Mapping[str, TensorPlan]
) -> tuple[dict[str, TensorPlan], list[Edit], list[Fault]]:
    """Folds for padded RMSNorm gains, edits for their eps, and the norms that cannot be padded."""
    folded: dict[str, TensorPlan] = {}
    edits: list[Edit] = []
    faults: list[Fault] = []
    others = dict(wide.named_modules())
    for path, module in base.named_modules():
        sizes = _size(module), _size(others.get(path))
        if sizes[0] is None or sizes[1] is None:
            continue
        n, goal = sizes[0], sizes[1]
        name = strip_wrappers(f"{path}.").rstrip(".")
        gain = f"{name}.weight" if name else "weight"
        # Without a gain no axis shows whether it is padded, so the sizes decide.
        if not (tensors[gain].padded if gain in tensors else goal % n):
            continue
        if not isinstance(module, nn.RMSNorm):
            faults.append(
                Fault(
                    "axis.padding_changes_mean",
                    name,
                    f"{type(module).__name__} over {n} -> {goal}: zeros would change its mean, so only whole multiples are exact",
                    f"nearest: {n * (goal // n)} (x{goal // n}), {n * (goal // n + 1)} (x{goal // n + 1})",
                )
            )
        elif module.eps is None:
            faults.append(
                Fault(
                    "axis.padding_without_eps",
                    name,
                    "RMSNorm(eps=None) on a padded axis: nothing can be scaled",
                    "give eps a number: RMSNorm(…, eps=1e-6)",
                )
            )
        elif gain not in tensors:
            faults.append(
                Fault(
                    "axis.padding_without_gain",
                    name,
                    "RMSNorm without a gain on a padded axis: nothing absorbs the share that is not zeros",
                    "use elementwise_affine=True, or a whole multiple",
                )
            )
        else:
            filled = Scale.of(tensors[gain].change.filled)
            folded[gain] = replace(tensors[gain], fold=tensors[gain].fold * filled ** Fraction(1, 2))
            edits.append(Edit(f"{name}.eps" if name else "eps", module.eps, filled))
    return folded, edits, faults


def _size(module: nn.Module | None) -> int | None:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return int(module.normalized_shape[-1])
    return module.num_channels if isinstance(module, nn.GroupNorm) else None
