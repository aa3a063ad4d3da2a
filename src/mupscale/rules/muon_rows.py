"""The rows of Muon as other packages define it: classes that hold Muon for matrices and another optimizer for the rest."""

from __future__ import annotations

from dataclasses import replace

from .optimizer_rule import DIMENSIONS, Decay, OptimizerRule, State, rule_by
from .torch_rows import ADAM, BY_LONG, BY_ROWS, HALF, ORTHOGONAL
from .units import NEUTRAL, ROWS, SHORT, G, W

_STEPS = {"momentum", "nesterov", "ns_steps"}
_ADAMW = OptimizerRule(lr=W, hyper={"eps": G}, decay=Decay.DECOUPLED, state=ADAM, neutral={"betas"})
_MATRIX = OptimizerRule(
    lr=ORTHOGONAL * BY_ROWS,
    decay=Decay.DECOUPLED,
    state={"momentum_buffer": G},
    neutral=_STEPS,
    entrywise=False,
)
# A kernel of a convolution is made orthogonal as one matrix, outputs by the rest. The factor of its own is the ratio of the
# kernel's height and width, which do not grow.
_KERNEL = replace(_MATRIX, lr=(W / G) ** HALF)
_KELLER_JORDAN = rule_by(DIMENSIONS, {2: _MATRIX, 3: _MATRIX, 4: _KERNEL})
_KELLER_JORDAN_HYBRID = rule_by("use_muon", {True: _KELLER_JORDAN, False: _ADAMW})

_MOONLIGHT = {
    True: replace(
        _MATRIX,
        lr=ORTHOGONAL * BY_LONG,
        decay_key="wd",
        state={"momentum_buffer": G, "use_muon": NEUTRAL},
    ),
    False: OptimizerRule(
        lr=W,
        hyper={"adamw_eps": G},
        decay=Decay.DECOUPLED,
        decay_key="wd",
        state={"moment1": G, "moment2": G**2, "use_muon": NEUTRAL},
        neutral={"adamw_betas"},
    ),
}

# nanochat gives every update the norm of an orthogonal matrix, the root of its shorter side, so its entries grow by the root
# of short over copies. What multiplies both the update and the decay is lr times the root of max(1, rows/columns).
_NANOCHAT = OptimizerRule(
    lr=ORTHOGONAL / ROWS**HALF,
    decay=(ORTHOGONAL / SHORT**HALF) ** -1,
    state={
        "momentum_buffer": G,
        "second_momentum_buffer": State(ORTHOGONAL**-2 * W**2 * SHORT, mean_over="short"),
    },
    neutral={"momentum", "ns_steps", "beta2"},
    entrywise=False,
    stacked=True,
)

MUONS: dict[str, OptimizerRule] = {
    "muon.Muon": _KELLER_JORDAN,
    "muon.SingleDeviceMuon": _KELLER_JORDAN,
    "muon.MuonWithAuxAdam": _KELLER_JORDAN_HYBRID,
    "muon.SingleDeviceMuonWithAuxAdam": _KELLER_JORDAN_HYBRID,
    "moonlight.Muon": rule_by("use_muon", _MOONLIGHT),
    "nanochat.optim.MuonAdamW": rule_by("kind", {"muon": _NANOCHAT, "adamw": _ADAMW}),
}
