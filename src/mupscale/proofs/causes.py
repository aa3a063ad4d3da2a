"""What can deviate, and the usual causes, as `verify` prints them, each with what to write."""

from __future__ import annotations

from typing import Literal

FailureKind = Literal[
    "loss", "gradient", "weight", "buffer", "setting", "batch", "clipping", "nothing_tested", "unrecorded"
]  # fmt: skip
BATCHES = (
    "different batches: the step draws its own batch, so that the base's call and the wide run's get two; write "
    "verify(…, step=lambda run, batch: …, batches=loader), and each batch is drawn once for both"
)
RANDOM = (
    "random numbers whose shape grows with the width, so that each copy gets its own: dropout or noise written by hand; "
    "set it to zero for the check"
)
CLIPPING = (
    "plain clipping: a gradient norm depends on the width, so that the bound acts at another size of the gradients; clip "
    "with mupscale.clip_before_step_(optimizer, run, max_norm=…)"
)
ATTENTION = (
    "the attention scale: the head size grows and 1/sqrt(head size) does not cancel its copies; use 1/head size in the "
    "model"
)
LAYOUT = "a wrong layout: its copies are not where the plan says"
AWAKE = "it is new and has a gradient, so it does not sleep: a bias that adds to the stream, or a weight that is not zero"
READOUT = "the readout: the output is off by one factor, so a multiplier of the model's code is missing in the plan; write declared=mu.Declared(folds={…}) where the plan is made"
PENALTY = (
    "the loss depends on the width by itself: all outputs of the model agree and the loss does not, as with a sum over "
    "the weights; use the optimizer's weight_decay, or weight every tensor's sum by its units"
)
WORDS = (
    "the loss counts words that the base does not have, which is another loss; write it over the base's words, "
    "logits[..., :old], or train by a loss over all words and do not expect the base's curve"
)
NOISE = (
    "noise: the wide run was made with noise, so it begins at other weights; verify the growth without it: "
    "mu.verify(base, make, plan=run.plan, …), with the factory in place of the run"
)
SCHEDULER = "an absolute learning rate: a scheduler or the step function sets lr itself; multiply the group's own lr instead"
STILL = "nothing was tested: a learning rate of zero, a loss that reaches no parameter, or everything frozen"
OPTIMIZER = "the optimizer: gradients agree and weights do not, so a state or setting has other units than the registry says"
START = (
    "the wide run does not start from the base's weights: it was loaded from other weights or with noise, "
    "or a constant of the model's code is missing in the plan"
)


BUFFER = (
    "forward writes this buffer by a rule that depends on the width, such as a sum or a norm over features"
)


def settings_cause(key: str, changed: bool) -> str:
    """Why a hyperparameter of the wide run is not the base's in the units of its model."""
    if key == "lr" and changed:
        return SCHEDULER
    if changed:
        return (
            f"an absolute {key}: the step function sets {key} itself; multiply the group's own {key} instead"
        )
    return f"unscaled {key}: the wide run's {key} is not the base's in the units of the wide model; take the groups that grow returns"
