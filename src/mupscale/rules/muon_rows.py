"""The rows of Muon as other packages define it: classes that hold Muon for matrices and another optimizer for the rest.

These classes are copied from file to file and changed on the way, so no class has one of these rows by its name alone.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import MupscaleError
from .optimizer_rule import DIMENSIONS, Decay, OptimizerRule, State
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
_KELLER_JORDAN = OptimizerRule.by_key(DIMENSIONS, {2: _MATRIX, 3: _MATRIX, 4: _KERNEL})
_KELLER_JORDAN_HYBRID = OptimizerRule.by_key("use_muon", {True: _KELLER_JORDAN, False: _ADAMW})

_MOONLIGHT = {
    True: replace(
        _MATRIX,
        lr=ORTHOGONAL * BY_LONG,
        decay_key="wd",
        state={"momentum_buffer": G, "use_muon": NEUTRAL},
        neutral={*_STEPS, "adamw_betas", "adamw_eps"},
    ),
    False: OptimizerRule(
        lr=W,
        hyper={"adamw_eps": G},
        decay=Decay.DECOUPLED,
        decay_key="wd",
        state={"moment1": G, "moment2": G**2, "use_muon": NEUTRAL},
        neutral={*_STEPS, "adamw_betas"},
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
    "keller_jordan": _KELLER_JORDAN,
    "keller_jordan_with_adam": _KELLER_JORDAN_HYBRID,
    "moonlight": OptimizerRule.by_key("use_muon", _MOONLIGHT),
    "nanochat": OptimizerRule.by_key("kind", {"muon": _NANOCHAT, "adamw": _ADAMW}),
}
"""The version of Muon -> its row."""

CLASSES: dict[str, tuple[str, ...]] = {
    "Muon": ("keller_jordan", "moonlight"),
    "SingleDeviceMuon": ("keller_jordan",),
    "MuonWithAuxAdam": ("keller_jordan_with_adam",),
    "SingleDeviceMuonWithAuxAdam": ("keller_jordan_with_adam",),
    "MuonAdamW": ("nanochat",),
}
"""The name of a class -> the versions that are called so."""


def muon_row(version: str) -> OptimizerRule:
    """Look up the row of a version of Muon, to register your copy of it with.

    Write `register_optimizer(Muon, "moonlight")`, and then `check_optimizer`, because copies differ.

    Args:
        version: The name of the published version.

    Returns:
        The row.

    Raises:
        MupscaleError: If the version has no row; the message lists those that have one.

    >>> str(muon_row("moonlight").row({"use_muon": False}, 2).hyper["adamw_eps"])
    'G'
    """
    if version not in MUONS:
        raise MupscaleError(
            f"{version!r} is no version of Muon with a row; write one of {', '.join(map(repr, MUONS))}, or the full name "
            "of a class",
            code="optimizer.unknown_muon_version",
        )
    return MUONS[version]


def line_to_write(name: str) -> str | None:
    """What to write for a class of this name that has no row, if it is called like a version of Muon."""
    versions = CLASSES.get(name, ())
    lines = [f"mupscale.rules.register_optimizer({name}, {v!r})" for v in versions]
    if not lines:
        return None
    return (
        f"copies of a class with this name differ; if its update is that of {' or '.join(versions)}, write "
        f"{' or '.join(lines)}, and prove it with mupscale.rules.check_optimizer"
    )
