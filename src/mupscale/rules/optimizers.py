"""The units of every optimizer's hyperparameters and state: the only copy of this table.

A row says how a learning rate, an epsilon or a moment behaves under W' = s dup(W), G' = r dup(G);
the factor follows from `units.Change.factor`. Rows are keyed by the qualified name of the class, so
that this file needs no torch and a state called `momentum_buffer` can mean G in SGD and 1 in RMSprop.

Knows: units, refusals. Does not know: tensors, parameter groups, how state is stored. What a row can say is in
`optimizer_rule.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ..arguments import shown, wrong_kind
from ..errors import MupscaleError, raise_faults
from .optimizer_rule import Decay as Decay
from .optimizer_rule import Group
from .optimizer_rule import OptimizerRule as OptimizerRule
from .optimizer_rule import State as State
from .optimizer_rule import decay_factor as decay_factor
from .optimizer_rule import lr_factor as lr_factor
from .scale import Scale
from .units import FILLED, NEUTRAL, G, W

HALF = Fraction(1, 2)


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
        return f"RAdam with betas[1] = {beta2} never leaves its first phase, which has other units; raise betas[1] above 2/3"
    first = next(t for t in range(1, 100_000) if rho(t) > 5)
    return (
        f"RAdam is at step {step:.0f}; until step {first - 1} its update is proportional to the gradient and "
        f"afterwards it is not, so no single learning rate is exact; train {first - 1 - step:.0f} more "
        "steps, then widen"
    )


ADAFACTOR_EPS1 = 1e-12
"""The largest eps[0] at which Adafactor is widened. It clamps mean squares of gradients, so at 1e-12 it acts only
where their root is below 1e-6; torch's default, float32's 1.2e-7, already acts below 3.5e-4."""


def _adafactor_eps(group: Group, state: Mapping[str, Any]) -> str | None:
    """eps[0] clamps a G^2 quantity and, squared, a G^2 quantity: no factor serves both when it bites."""
    eps1 = group["eps"][0]
    if eps1 is not None and float(eps1) <= ADAFACTOR_EPS1:
        return None
    return (
        f"Adafactor's eps[0] is {eps1}, which it uses with the units G and G^2 at once, so it must be too "
        f"small to matter; set eps=(1e-12, {group['eps'][1]}) or smaller"
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
        state={"eta": W / G, "mu": NEUTRAL, "ax": State(W, copy=True)},
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
        lr=FILLED**-HALF,
        hyper={"eps": (G, W * FILLED**HALF), "d": FILLED**HALF},
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

_ROW = "write mupscale.rules.OptimizerRule(lr=…, state=…)"

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
    if not isinstance(optimizer, type):
        raise MupscaleError(
            f"the optimizer is {shown(optimizer)}, expected a class or its full name; write type(optimizer)"
        )
    inside_torch = optimizer.__module__.split(".")[:2] == ["torch", "optim"]
    return f"{'torch.optim' if inside_torch else optimizer.__module__}.{optimizer.__qualname__}"


def register_optimizer(optimizer_class: type | str, rule: OptimizerRule) -> None:
    """State the units of a third-party optimizer, so that its runs can be widened.

    >>> row = OptimizerRule(lr=W, decay=Decay.DECOUPLED, state={"exp_avg": G}, neutral={"betas"})
    >>> register_optimizer("example.Lion", row)
    >>> rule_for("example.Lion") is row
    True
    >>> del RULES["example.Lion"]                                     # it was for this example only
    """
    raise_faults("this optimizer cannot be registered", wrong_kind("rule", rule, OptimizerRule, _ROW))
    RULES[qualified_name(optimizer_class)] = rule


def rule_for(
    optimizer_class: type | str, *, rules: Mapping[str, OptimizerRule] | None = None
) -> OptimizerRule:
    """The row of an optimizer class; one without a row is refused, never guessed.

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
    for refused, reason in REFUSED.items():
        if name == refused or (refused.endswith(".") and name.startswith(refused)):
            raise MupscaleError(f"{name} cannot be widened exactly: {reason}")
    raise MupscaleError(f"no units are known for the optimizer {name}; {_hint(optimizer_class, name, table)}")


def _hint(optimizer: type | str, name: str, table: Mapping[str, OptimizerRule]) -> str:
    """What to write for an optimizer that has no row."""
    full = next((known for known in table if known.rpartition(".")[2] == name), None)
    if full is not None:
        return f"write its full name, {full!r}"
    parents = [] if isinstance(optimizer, str) else map(qualified_name, optimizer.__mro__[1:])
    parent = next((parent for parent in parents if parent in table), None)
    if parent is not None:
        here, there = name.rpartition(".")[2], parent.rpartition(".")[2]
        line = f"mupscale.rules.register_optimizer({here}, mupscale.rules.rule_for({there}))"
        return f"it derives from {parent}; if its update is the same, write {line}"
    return (
        "state its units with mupscale.rules.register_optimizer(cls, mupscale.rules.OptimizerRule(...)) "
        "and prove them with mupscale.rules.check_optimizer"
    )
