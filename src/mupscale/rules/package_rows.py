"""The rows of optimizers that other packages define, other than Muon: units of their settings and state.

A row is keyed by the name under which users import the class. A class that was copied into another file is registered
with the row of its original: `register_optimizer(Lion, "lion_pytorch.Lion")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .optimizer_rule import Decay, Group, OptimizerRule, State
from .torch_rows import ADAM, HALF, TORCH
from .units import FILLED, NEUTRAL, G, Units, W


def _in_train_mode(group: Group, state: Mapping[str, Any]) -> str | None:
    """In eval mode the weights hold the average, from which no step may be taken; without state there is none yet."""
    if group.get("train_mode", True) or "z" not in state:
        return None
    return "schedule-free optimizers are widened in train mode, and this one is in eval mode; call optimizer.train()"


def _silent_or_rectified(group: Group, state: Mapping[str, Any]) -> str | None:
    """As torch's RAdam, its first steps are proportional to the gradient, unless they are left out."""
    if (reason := _in_train_mode(group, state)) is not None or group["silent_sgd_phase"]:
        return reason
    beta2, step = float(group["betas"][1]), int(group["k"]) + 1
    rho = 2 / (1 - beta2) - 1 - 2 * step * beta2**step / (1 - beta2**step)
    if rho > 4:
        return None
    return (
        f"RAdamScheduleFree is at step {step - 1} with silent_sgd_phase=False, where its update is proportional to the "
        "gradient, and later it is not; set silent_sgd_phase=True, or train on until step 5"
    )


def schedule_free(lr: Units, **row: Any) -> OptimizerRule:
    """The row of a schedule-free optimizer, whose groups keep a sum of powers of lr."""
    fixed: dict[str, Any] = {"refuse": _in_train_mode, **row}
    hyper, state = dict(fixed.pop("hyper", {})), dict(fixed.pop("state", {}))
    neutral = {"r", "k", "train_mode", "weight_lr_power", "warmup_steps"} | fixed.pop("neutral")
    rates = {"lr_max": lr, "scheduled_lr": lr}
    return OptimizerRule.by_key(
        "weight_lr_power",
        {
            power: OptimizerRule(
                lr=lr,
                hyper={**hyper, **rates, "weight_sum": lr**power},
                state={**state, "z": State(W, copy=True)},
                neutral=neutral,
                **fixed,
            )
            for power in (2, 1, 0)
        },
    )


_ROW_AND_COLUMN = {
    "exp_avg_sq_row": State(G**2, mean_over=-1, dropped=True),
    "exp_avg_sq_col": State(G**2, mean_over=-2, dropped=True),
    "exp_avg_sq": State(G**2),
}
_RMS = W * FILLED**HALF
"""The root of the mean square of the weights."""


def _relative_to_nothing(group: Group, state: Mapping[str, Any]) -> str:
    return (
        "Adafactor with relative_step=True and scale_parameter=False takes its rate from the number of the step alone, so no "
        "setting can give that rate the units of a tensor; train with relative_step=False and an lr, or with "
        "scale_parameter=True"
    )


def _adafactor(lr: Units, **more: Any) -> OptimizerRule:
    """transformers' Adafactor. Its decay is multiplied by the rate that it computes, which has the units of a weight."""
    return OptimizerRule(
        lr=lr,
        hyper={"eps": (G**2, _RMS), "clip_threshold": FILLED**HALF},
        decay=W**-1,
        state={**_ROW_AND_COLUMN, "exp_avg": W, "RMS": _RMS},
        neutral={"decay_rate", "beta1", "warmup_init"},
        entrywise=False,
        agrees_with_mup=lr == W,
        **more,
    )


# A relative step does not read lr. Its rate is the root of the mean square of the weights times a number that follows from
# the step, and no setting corrects that mean for padding.
_ADAFACTOR = OptimizerRule.by_key(
    "relative_step",
    {
        False: OptimizerRule.by_key(
            "scale_parameter", {True: _adafactor(FILLED**-HALF), False: _adafactor(W)}
        ),
        True: OptimizerRule.by_key(
            "scale_parameter",
            {
                True: _adafactor(NEUTRAL, takes_padding=False),
                False: _adafactor(NEUTRAL, refuse=_relative_to_nothing),
            },
        ),
    },
)


_CAME = OptimizerRule(
    lr=W,
    hyper={"eps": (G**2, NEUTRAL), "clip_threshold": FILLED**HALF},
    decay=Decay.DECOUPLED,
    state={
        **_ROW_AND_COLUMN,
        "exp_avg": NEUTRAL,
        "exp_avg_res_row": State(NEUTRAL, mean_over=-1, dropped=True),
        "exp_avg_res_col": State(NEUTRAL, mean_over=-2, dropped=True),
        "RMS": _RMS,
    },
    neutral={"betas"},
    entrywise=False,
)
_LION = OptimizerRule(lr=W, decay=Decay.DECOUPLED, state={"exp_avg": G}, neutral={"betas"})
_ADAMW = OptimizerRule(
    lr=W, hyper={"eps": G}, decay=Decay.DECOUPLED, state=ADAM, neutral={"betas", "amsgrad"}
)


_BNB_KEYS = {"alpha", "t_alpha", "t_beta3", "betas"}


def _bitsandbytes(state: Mapping[str, Any], **row: Any) -> OptimizerRule:
    """A class of bitsandbytes, which calls its moments state1 and state2."""
    return OptimizerRule(lr=W, state=state, neutral=_BNB_KEYS | row.pop("more", set()), **row)


_BNB_ADAM = _bitsandbytes({"state1": G, "state2": G**2}, hyper={"eps": G}, decay=Decay.DECOUPLED)
_BNB_ADEMAMIX = _bitsandbytes(
    {"state1": State(G, stack=2), "state2": G**2}, hyper={"eps": G}, decay=Decay.DECOUPLED
)
_BNB_LION = _bitsandbytes({"state1": G}, decay=Decay.DECOUPLED, more={"eps"})
_BNB_RMSPROP = _bitsandbytes({"state1": G**2}, hyper={"eps": G}, decay=Decay.COUPLED)
_TORCHAO = replace(_ADAMW, state={**ADAM, "max_exp_avg_sq": G**2})
_LOW_BITS = ("4bit", "8bit", "Fp8")


def _optimi(row: OptimizerRule, **changes: Any) -> OptimizerRule:
    """A class of optimi: betas one by one, Kahan sums, and decay that may be multiplied by lr/max_lr alone."""
    keys = {"beta1", "beta2", "kahan_sum", "triton", "gradient_release", "setup", "step", "decouple_wd"}
    own = replace(
        row,
        hyper={**row.hyper, "max_lr": W},
        state={**row.state, "kahan_comp": W, "eps_sq": G**2},
        neutral=keys,
        **changes,
    )
    return OptimizerRule.by_key("decouple_lr", {False: own, True: replace(own, decay=Decay.INDEPENDENT)})


def _pytorch_optimizer(row: OptimizerRule, *neutral: str, **changes: Any) -> OptimizerRule:
    """A class of pytorch_optimizer, which counts steps in its groups; decay that is not multiplied by lr has no row."""
    keys = {"betas", "step", "ams_bound", *neutral}
    own = replace(row, neutral=keys, decay=Decay.COUPLED, decoupled_flag="weight_decouple", **changes)
    return OptimizerRule.by_key("fixed_decay", {False: own, None: own})


PACKAGES: dict[str, OptimizerRule] = {
    "transformers.Adafactor": _ADAFACTOR,
    "came_pytorch.CAME": _CAME,
    "lion_pytorch.Lion": _LION,
    "optimi.StableAdamW": _optimi(_ADAMW, takes_padding=False),
    "torchdistx.optimizers.AnyPrecisionAdamW": replace(
        _ADAMW,
        state={**ADAM, "compensation": W},
        neutral={
            "betas",
            "use_kahan_summation",
            "momentum_dtype",
            "variance_dtype",
            "compensation_buffer_dtype",
        },
    ),
    "torch_xla.amp.syncfree.AdamW": TORCH["torch.optim.AdamW"],
    # Its decay is AdamW's unless it was built with adam_w_mode=False, which neither its groups nor its state tell.
    "transformer_engine.pytorch.optimizers.FusedAdam": replace(_ADAMW, neutral={"betas", "bias_correction"}),
    "schedulefree.AdamWScheduleFree": schedule_free(
        W, hyper={"eps": G}, decay=Decay.DECOUPLED, state={"exp_avg_sq": G**2}, neutral={"betas"}
    ),
    "schedulefree.RAdamScheduleFree": schedule_free(
        W,
        hyper={"eps": G},
        decay=Decay.DECOUPLED,
        state={"exp_avg_sq": G**2},
        neutral={"betas", "silent_sgd_phase"},
        refuse=_silent_or_rectified,
    ),
    "schedulefree.SGDScheduleFree": schedule_free(W / G, decay=Decay.COUPLED, neutral={"momentum"}),
    "pytorch_optimizer.AdEMAMix": _pytorch_optimizer(
        _ADAMW, "alpha", "t_alpha_beta3", state={**ADAM, "exp_avg_slow": G}
    ),
    "pytorch_optimizer.ADOPT": _pytorch_optimizer(_ADAMW, state={**ADAM, "exp_avg": NEUTRAL}),
    **{
        f"bitsandbytes.optim.{paged}AdamW{bits}": _BNB_ADAM
        for paged in ("", "Paged")
        for bits in ("", "8bit", "32bit")
    },
    **{
        f"bitsandbytes.optim.{paged}Lion{bits}": _BNB_LION
        for paged in ("", "Paged")
        for bits in ("", "8bit", "32bit")
    },
    **{
        f"bitsandbytes.optim.{paged}AdEMAMix{bits}": _BNB_ADEMAMIX
        for paged in ("", "Paged")
        for bits in ("", "8bit", "32bit")
    },
    **{f"bitsandbytes.optim.RMSprop{bits}": _BNB_RMSPROP for bits in ("", "8bit", "32bit")},
    **{f"torchao.optim.AdamW{bits}": _TORCHAO for bits in _LOW_BITS},
    "torchao.optim._AdamW": _TORCHAO,
}
