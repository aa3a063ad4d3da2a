"""All steps of a goal, and the plan that they make together: structure first, then width.

The full model and its small copy are composed by the same two functions. For `-k 2 --to vocab=+64,layers=4`:

    compose        base -> 576 words -> 4 layers            a chain of configurations
    whole_plan     words.then(blocks.then(width))           one plan, from the base to the wide model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from importlib import import_module

from ...plans.plan import Plan
from ...plans.tensor_plan import Powers
from ..config.goal import Goal
from ..copy.lift import Tensors
from ..copy.trial import End
from . import STEPS
from .experts import refuse_wider
from .step import Chain, Step
from .width import Width


def compose(start: End, goal: Goal) -> Chain:
    """What a goal makes of a model before its width grows; refused where a step is not known to be exact.

    >>> from ..models import config_from, model_class
    >>> sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> config = config_from({"model_type": "llama", "vocab_size": 512, **sizes})
    >>> chain = compose(End(config, model_class(config)), Goal.parse(2, "vocab=+64,layers=4"))
    >>> [(end.config.vocab_size, end.config.num_hidden_layers) for end in chain.ends]
    [(512, 2), (576, 2), (576, 4)]
    """
    refuse_wider(goal)
    chain = Chain(start)
    for asked in STEPS:
        step: Step | None = import_module(f"{__package__}.{asked.file}").step_of(chain.last, goal.to)
        chain = chain if step is None else chain.then(step)
    return chain


def whole_plan(
    chain: Chain, plans: Sequence[Plan], width: Width, source: tuple[Plan, Powers], wide: Tensors
) -> tuple[Plan, Powers]:
    """The plan from the start of a chain to the wide model, and the powers in its folds.

    `plans` are those of the steps; `source` is the plan of the width, and its powers, as found at other sizes.
    """
    plan, powers = width.lifted(chain.last, source, Tensors.of(chain.models[-1]), wide)
    plan = reduce(lambda later, step: step.then(later), reversed(plans), plan)
    return replace(plan, proof="copy"), powers
