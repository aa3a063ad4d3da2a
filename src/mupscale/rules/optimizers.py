"""The units of every optimizer's hyperparameters and state: the only copy of this table.

A row says how a learning rate, an epsilon or a moment behaves under W' = s dup(W), G' = r dup(G);
the factor follows from `units.Change.factor`. Rows are keyed by the qualified name of the class, so
that this file needs no torch and a state called `momentum_buffer` can mean G in SGD and 1 in RMSprop.

Knows: where rows and refusals are found. Does not know: tensors, parameter groups, how state is stored. What a row can
say is in `optimizer_rule.py`; the rows are in `torch_rows.py` and `package_rows.py`, and those that users register by hand in `muon_rows.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ..arguments import shown, wrong_kind
from ..errors import MupscaleError, raise_faults
from .muon_rows import line_to_write, muon_row
from .optimizer_rule import OptimizerRule
from .package_rows import PACKAGES
from .torch_rows import TORCH

RULES: dict[str, OptimizerRule] = {**TORCH, **PACKAGES}

_ROW = "write mupscale.rules.OptimizerRule(lr=…, state=…)"


def qualified_name(optimizer: type | str) -> str:
    """The public name of a class: that of the shortest module which has it, as users import it.

    >>> qualified_name("torch.optim.AdamW")
    'torch.optim.AdamW'
    """
    if isinstance(optimizer, str):
        return optimizer
    if not isinstance(optimizer, type):
        raise MupscaleError(
            f"the optimizer is {shown(optimizer)}, expected a class or its full name; write type(optimizer)",
            code="optimizer.not_a_class",
        )
    parts = optimizer.__module__.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), optimizer.__qualname__, None) is optimizer:
            return f"{module}.{optimizer.__qualname__}"
    return f"{optimizer.__module__}.{optimizer.__qualname__}"


def register_optimizer(optimizer_class: type | str, rule: OptimizerRule | type | str) -> None:
    """State the units of an optimizer that is not in torch, so that its runs can be grown.

    Args:
        optimizer_class: The class, or its full name: "lion_pytorch.Lion".
        rule: The row with its units. For a copy of a class that has a row, that class or its full name; for a copy of Muon the name
            of its version: "moonlight".

    Raises:
        MupscaleError: If the row is no `OptimizerRule`, or nothing is known by this name.

    >>> from mupscale.rules import G, W
    >>> row = OptimizerRule(lr=W, decay="decoupled", state={"exp_avg": G}, neutral={"betas"})
    >>> register_optimizer("example.Lion", row)
    >>> rule_for("example.Lion") is row
    True
    >>> register_optimizer("example.Copy", "lion_pytorch.Lion")
    >>> del RULES["example.Lion"], RULES["example.Copy"]              # they were for this example only
    """
    if isinstance(rule, str) and "." not in rule:
        rule = muon_row(rule)
    elif isinstance(rule, str | type):
        rule = rule_for(rule)
    raise_faults("this optimizer cannot be registered", wrong_kind("rule", rule, OptimizerRule, _ROW))
    RULES[qualified_name(optimizer_class)] = rule


def rule_for(
    optimizer_class: type | str, *, rules: Mapping[str, OptimizerRule] | None = None
) -> OptimizerRule:
    """Look up the row of an optimizer class; one without a row is refused, never guessed.

    Args:
        optimizer_class: The class, or its full name: "torch.optim.AdamW".
        rules: Rows to look in, in place of the registry.

    Returns:
        The row.

    Raises:
        Undecided: If the class has no row. The message says what to write.
        NotExact: If it is known that no row can be exact.

    >>> str(rule_for("torch.optim.AdamW").hyper["eps"])
    'G'
    """
    table = RULES if rules is None else rules
    name = qualified_name(optimizer_class)
    if name in table:
        raise_faults(
            f"rules[{name!r}] is not an OptimizerRule", wrong_kind(name, table[name], OptimizerRule, _ROW)
        )
        return table[name]
    from .refused import why_refused

    if (reason := why_refused(name)) is not None:
        raise MupscaleError(
            f"{name} cannot be widened exactly: {reason}", code="optimizer.not_widened_exactly"
        )
    raise MupscaleError(
        f"no units are known for the optimizer {name}; {_hint(optimizer_class, name, table)}",
        code="optimizer.unknown_class",
    )


def _hint(optimizer: type | str, name: str, table: Mapping[str, OptimizerRule]) -> str:
    """What to write for an optimizer that has no row."""
    full = next((known for known in table if known.rpartition(".")[2] == name), None)
    if full is not None:
        return f"write its full name, {full!r}"
    parents = [] if isinstance(optimizer, str) else map(qualified_name, optimizer.__mro__[1:])
    parent = next((parent for parent in parents if parent in table), None)
    if parent is not None:
        here, there = name.rpartition(".")[2], parent.rpartition(".")[2]
        line = f"mupscale.rules.register_optimizer({here}, {there})"
        return f"it derives from {parent}; if its update is the same, write {line}"
    if (muon := line_to_write(name.rpartition(".")[2])) is not None:
        return muon
    return (
        "state its units with mupscale.rules.register_optimizer(cls, mupscale.rules.OptimizerRule(...)) "
        "and prove them with mupscale.rules.check_optimizer"
    )
