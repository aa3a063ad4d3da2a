"""The units of every optimizer's hyperparameters and state: the only copy of this table.

A row says how a learning rate, an epsilon or a moment behaves under W' = s dup(W), G' = r dup(G);
the factor follows from `units.Change.factor`. Rows are keyed by the qualified name of the class, so
that this file needs no torch and a state called `momentum_buffer` can mean G in SGD and 1 in RMSprop.

Knows: units, decay kinds, refusals. Does not know: tensors, parameter groups, how state is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from ..errors import MupscaleError
from .scale import Scale
from .units import FILL, NEUTRAL, Change, G, Units, W

HALF = Fraction(1, 2)
Group = Mapping[str, Any]


class Decay(Enum):
    """How an optimizer applies `weight_decay`.

    >>> rule_for("torch.optim.AdamW").decay.name, rule_for("torch.optim.SGD").decay.name
    ('DECOUPLED', 'COUPLED')
    """

    COUPLED = "added to the gradient"
    DECOUPLED = "multiplied by lr, beside the update"
    INDEPENDENT = "beside the update, not multiplied by lr"


@dataclass(frozen=True)
class State:
    """Units of one state tensor; `mean_over` names the dimension a factored moment averages away.

    >>> str(rule_for("torch.optim.Adafactor").state["row_var"].units)
    'G^2'
    """

    units: Units
    mean_over: int | None = None


@dataclass(frozen=True)
class OptimizerRule:
    """One row of the table.

    A third-party optimizer is registered by writing its row, and proved by `check_optimizer`:

    >>> lion = OptimizerRule(lr=W, decay=Decay.DECOUPLED, state={"exp_avg": G}, neutral={"betas"})
    >>> str(lion.state["exp_avg"].units)
    'G'
    """

    lr: Units
    hyper: Mapping[str, Units | tuple[Units, ...]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    neutral: frozenset[str] | set[str] = frozenset()
    decay: Decay | None = None
    decoupled_flag: str | None = None
    """A group key that, when true, turns `decay` into DECOUPLED."""
    shape_factor: Callable[[Group, tuple[int, ...]], Scale] | None = None
    """What the optimizer itself multiplies lr by because of a tensor's shape."""
    refuse: Callable[[Group, Mapping[str, Any]], str | None] | None = None
    """Given a group and a parameter's state: why widening cannot be exact now, or None."""
    constructor_only: frozenset[str] | set[str] = frozenset()
    """Settings that the optimizer reads when it is made, not from its groups."""
    entrywise: bool = True
    agrees_with_mup: bool = True

    def __post_init__(self) -> None:
        state = {k: v if isinstance(v, State) else State(v) for k, v in self.state.items()}
        object.__setattr__(self, "state", MappingProxyType({"step": State(NEUTRAL), **state}))
        object.__setattr__(self, "hyper", MappingProxyType(dict(self.hyper)))
        object.__setattr__(self, "neutral", frozenset(self.neutral))

    def decay_kind(self, group: Group) -> Decay | None:
        if self.decoupled_flag is not None and group.get(self.decoupled_flag):
            return Decay.DECOUPLED
        return self.decay

    def known(self, key: str) -> bool:
        """True for a hyperparameter whose units this row states."""
        return (
            key in _UNIVERSAL
            or key in self.hyper
            or key in self.neutral
            or key == self.decoupled_flag
            or (key == "weight_decay" and self.decay is not None)
        )


_UNIVERSAL = frozenset(
    {
        "params",
        "lr",
        "initial_lr",
        "lr_factor",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
    }
)


def _radam_rectifies(group: Group, state: Mapping[str, Any]) -> str | None:
    """RAdam takes plain momentum steps (degree 1) until rho_t > 5, adaptive ones (degree 0) after."""
    beta2 = float(group["betas"][1])
    rho_inf = 2 / (1 - beta2) - 1
    step = float(state.get("step", 0))

    def rho(t: float) -> float:
        shrunk: float = beta2**t
        return rho_inf - 2 * t * shrunk / (1 - shrunk)

    if rho(step + 1) > 5:
        return None
    if rho_inf <= 5:
        return f"RAdam with betas[1] = {beta2} never leaves its first phase, which has other units: raise betas[1] above 2/3"
    first = next(t for t in range(1, 100_000) if rho(t) > 5)
    return (
        f"RAdam is at step {step:.0f}; until step {first - 1} its update is proportional to the gradient and "
        f"afterwards it is not, so no single learning rate is exact: train {first - 1 - step:.0f} more "
        "steps, then widen"
    )


ADAFACTOR_EPS1 = 1e-12


def _adafactor_eps(group: Group, state: Mapping[str, Any]) -> str | None:
    """eps[0] clamps a G^2 quantity and, squared, a G^2 quantity: no factor serves both when it bites."""
    eps1 = group["eps"][0]
    if eps1 is not None and float(eps1) <= ADAFACTOR_EPS1:
        return None
    return (
        f"Adafactor's eps[0] is {eps1}, which it uses with the units G and G^2 at once, so it must be too "
        f"small to matter: set eps=(1e-12, {group['eps'][1]}) or smaller"
    )


def _muon_shape(group: Group, shape: tuple[int, ...]) -> Scale:
    rows, columns = shape[0], shape[1]
    if group.get("adjust_lr_fn") in (None, "original"):
        return Scale.of(max(Fraction(1), Fraction(rows, columns))) ** HALF
    return Scale.of(max(rows, columns)) ** HALF  # match_rms_adamw; its 0.2 cancels in every ratio


_ADAM = {"exp_avg": G, "exp_avg_sq": G**2}

RULES: dict[str, OptimizerRule] = {
    "torch.optim.SGD": OptimizerRule(
        lr=W / G,
        decay=Decay.COUPLED,
        state={"momentum_buffer": G},
        neutral={"momentum", "dampening", "nesterov"},
    ),
    "torch.optim.Adam": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.COUPLED,
        decoupled_flag="decoupled_weight_decay",
        state={**_ADAM, "max_exp_avg_sq": G**2},
        neutral={"betas", "amsgrad"},
    ),
    "torch.optim.AdamW": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.DECOUPLED,
        decoupled_flag="decoupled_weight_decay",
        state={**_ADAM, "max_exp_avg_sq": G**2},
        neutral={"betas", "amsgrad"},
    ),
    "torch.optim.Adamax": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.COUPLED,
        state={"exp_avg": G, "exp_inf": G},
        neutral={"betas"},
    ),
    "torch.optim.NAdam": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.COUPLED,
        decoupled_flag="decoupled_weight_decay",
        state={**_ADAM, "mu_product": NEUTRAL},
        neutral={"betas", "momentum_decay"},
    ),
    "torch.optim.RAdam": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.COUPLED,
        decoupled_flag="decoupled_weight_decay",
        state=_ADAM,
        neutral={"betas"},
        refuse=_radam_rectifies,
    ),
    "torch.optim.RMSprop": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.COUPLED,
        state={"square_avg": G**2, "grad_avg": G, "momentum_buffer": NEUTRAL},
        neutral={"momentum", "alpha", "centered"},
    ),
    "torch.optim.Adagrad": OptimizerRule(
        lr=W,
        hyper={"eps": G, "initial_accumulator_value": G**2},
        decay=Decay.COUPLED,
        state={"sum": G**2},
        neutral={"lr_decay"},
        constructor_only={"initial_accumulator_value"},
    ),
    "torch.optim.Adadelta": OptimizerRule(
        lr=W / G,
        hyper={"eps": G**2},
        decay=Decay.COUPLED,
        state={"square_avg": G**2, "acc_delta": G**2},
        neutral={"rho"},
    ),
    "torch.optim.ASGD": OptimizerRule(
        lr=W / G,
        hyper={"lambd": G / W},
        decay=Decay.COUPLED,
        state={"eta": W / G, "mu": NEUTRAL, "ax": W},
        neutral={"alpha", "t0"},
    ),
    "torch.optim.Rprop": OptimizerRule(
        lr=W,
        hyper={"step_sizes": (W, W)},
        state={"prev": G, "step_size": W},
        neutral={"etas"},
    ),
    "torch.optim.SparseAdam": OptimizerRule(lr=W, hyper={"eps": G}, state=_ADAM, neutral={"betas"}),
    "torch.optim.Adafactor": OptimizerRule(
        lr=FILL**-HALF,
        hyper={"eps": (G, W * FILL**HALF), "d": FILL**HALF},
        decay=Decay.DECOUPLED,
        state={
            "row_var": State(G**2, mean_over=-1),
            "col_var": State(G**2, mean_over=-2),
            "variance": G**2,
        },
        neutral={"beta2_decay"},
        refuse=_adafactor_eps,
        entrywise=False,
        agrees_with_mup=False,
    ),
    "torch.optim.Muon": OptimizerRule(
        lr=(W / G) ** HALF,
        hyper={"eps": (G / W) ** HALF},
        decay=Decay.DECOUPLED,
        state={"momentum_buffer": G},
        neutral={"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"},
        shape_factor=_muon_shape,
        entrywise=False,
    ),
}

REFUSED = {
    "torch.optim.LBFGS": (
        "LBFGS mixes all tensors in one inner product, so per-tensor units cannot be applied to it; "
        "widen the weights alone with optimizers=[] and start LBFGS afresh"
    ),
    "bitsandbytes.": (
        "8-bit state is quantised in blocks of neighbouring entries, which copies would mix; "
        "convert the state to 32 bits before widening"
    ),
    "torchao.optim.": (
        "low-bit state is quantised in blocks of neighbouring entries, which copies would mix; "
        "convert the state to 32 bits before widening"
    ),
}


def qualified_name(optimizer: type | str) -> str:
    """The public name of a class; torch's own are spelled as users import them.

    >>> qualified_name("torch.optim.AdamW")
    'torch.optim.AdamW'
    """
    if isinstance(optimizer, str):
        return optimizer
    inside_torch = optimizer.__module__.split(".")[:2] == ["torch", "optim"]
    return f"{'torch.optim' if inside_torch else optimizer.__module__}.{optimizer.__qualname__}"


def register_optimizer(optimizer: type | str, rule: OptimizerRule) -> None:
    """State the units of a third-party optimizer, so that its runs can be widened.

    >>> row = OptimizerRule(lr=W, decay=Decay.DECOUPLED, state={"exp_avg": G}, neutral={"betas"})
    >>> register_optimizer("example.Lion", row)
    >>> rule_for("example.Lion") is row
    True
    >>> del RULES["example.Lion"]                                     # it was for this example only
    """
    RULES[qualified_name(optimizer)] = rule


def rule_for(optimizer: type | str, rules: Mapping[str, OptimizerRule] | None = None) -> OptimizerRule:
    """The row of an optimizer class; one without a row is refused, never guessed.

    >>> str(rule_for("torch.optim.AdamW").hyper["eps"])
    'G'
    """
    table = RULES if rules is None else rules
    name = qualified_name(optimizer)
    if name in table:
        return table[name]
    for refused, reason in REFUSED.items():
        if name == refused or (refused.endswith(".") and name.startswith(refused)):
            raise MupscaleError(f"{name} cannot be widened exactly: {reason}")
    parents = [] if isinstance(optimizer, str) else map(qualified_name, optimizer.__mro__[1:])
    parent = next((parent for parent in parents if parent in table), None)
    hint = (
        f"it derives from {parent}; if its update is the same, write "
        f"mupscale.register_optimizer({name.rpartition('.')[2]}, mupscale.rule_for({parent.rpartition('.')[2]}))"
        if parent
        else "state its units with mupscale.register_optimizer(cls, mupscale.OptimizerRule(...)) "
        "and prove them with mupscale.check_optimizer"
    )
    raise MupscaleError(f"no units are known for the optimizer {name}: {hint}")


def lr_factor(
    rule: OptimizerRule, group: Group, change: Change, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Scale:
    """What lr is multiplied by: its units, divided by the change of the optimizer's own shape factor."""
    factor = change.factor(rule.lr)
    if rule.shape_factor is not None:
        base, wide = shapes
        factor = factor * rule.shape_factor(group, base) / rule.shape_factor(group, wide)
    return factor


def decay_factor(kind: Decay | None, change: Change, lr: Scale) -> Scale:
    """What weight_decay is multiplied by, given the factor put on lr."""
    if kind is Decay.COUPLED:
        return change.factor(G / W)
    return lr**-1 if kind is Decay.DECOUPLED else Scale()
