"""The rows of torch's own optimizers: units of their settings and state, and when they cannot be exact."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from .optimizer_rule import Decay, Group, OptimizerRule, State
from .units import BLOCKS, COLUMNS, FILLED, NEUTRAL, ROWS, SHORT, G, Units, W

HALF = Fraction(1, 2)
ORTHOGONAL = (W / G) ** HALF / BLOCKS**HALF
"""The rate of an update that is made orthogonal: s times the root of the copies inside one matrix. An orthogonal matrix
whose rows and columns are copied is that root too large."""
BY_ROWS = (SHORT / ROWS) ** HALF
"""One over Muon's own factor, the root of max(1, rows/columns), which is that of rows/short."""
BY_LONG = (SHORT / (ROWS * COLUMNS)) ** HALF
"""One over the root of the longer side, by which Muon matches the size of AdamW's updates."""


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
        "steps, then grow, or train with NAdam, which has no such phase"
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


def _muon(shape: Units) -> OptimizerRule:
    return OptimizerRule(
        lr=ORTHOGONAL * shape,
        hyper={"eps": (G / W) ** HALF / BLOCKS**HALF},
        decay=Decay.DECOUPLED,
        state={"momentum_buffer": G},
        neutral={"momentum", "nesterov", "ns_coefficients", "ns_steps"},
        entrywise=False,
    )


ADAM = {"exp_avg": G, "exp_avg_sq": G**2}
"""Adam's moments."""

TORCH: dict[str, OptimizerRule] = {
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
        state={**ADAM, "max_exp_avg_sq": G**2},
        neutral={"betas", "amsgrad"},
    ),
    "torch.optim.AdamW": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.DECOUPLED,
        decoupled_flag="decoupled_weight_decay",
        state={**ADAM, "max_exp_avg_sq": G**2},
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
        state={**ADAM, "mu_product": NEUTRAL},
        neutral={"betas", "momentum_decay"},
    ),
    "torch.optim.RAdam": OptimizerRule(
        lr=W,
        hyper={"eps": G},
        decay=Decay.COUPLED,
        decoupled_flag="decoupled_weight_decay",
        state=ADAM,
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
    "torch.optim.SparseAdam": OptimizerRule(lr=W, hyper={"eps": G}, state=ADAM, neutral={"betas"}),
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
    "torch.optim.Muon": OptimizerRule.by_key(
        "adjust_lr_fn",
        {None: _muon(BY_ROWS), "original": _muon(BY_ROWS), "match_rms_adamw": _muon(BY_LONG)},
    ),
}
