"""Models as people write them, in two widths each, with a judgement: growth is exact, impossible or an open question.

Each file holds one kind of model. `ZOO` has all entries by name.
"""

from harness.zoo import attention, gates, norms, plain, recurrent, transformers, vision, weights
from harness.zoo.entry import Entry

ZOO: dict[str, Entry] = {
    entry.name: entry
    for kind in (plain, gates, attention, transformers, recurrent, norms, weights, vision)
    for entry in kind.MODELS
}
