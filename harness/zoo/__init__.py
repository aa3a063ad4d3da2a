"""Models as people write them, in two widths each, with a judgement: growth is exact, impossible or an open question.

Each file holds one kind of model. `ZOO` has all entries by name.
"""

from harness.zoo import (
    attention,
    examples,
    gates,
    generative,
    graphs,
    huggingface,
    libraries,
    norms,
    plain,
    recommenders,
    recurrent,
    repositories,
    retrieval,
    torchvision,
    transformers,
    vision,
    weights,
)
from harness.zoo.entry import Entry

KINDS = (
    plain, gates, norms, weights, attention, transformers, recurrent, vision, recommenders, retrieval, graphs,
    generative, repositories, examples, torchvision, huggingface, libraries,
)  # fmt: skip
ZOO: dict[str, Entry] = {entry.name: entry for kind in KINDS for entry in kind.MODELS}
assert len(ZOO) == sum(len(kind.MODELS) for kind in KINDS), "two models have one name"
