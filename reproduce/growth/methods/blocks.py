"""Growth by blocks of a Llama: copies in several orders, with writers of several sizes, and an empty optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

import mupscale as mu

from .method import OURS, Growth, Method

WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
State = dict[str, Tensor]
Order = Callable[[int, Growth], int]
"""Which block of the base block i is a copy of."""


def in_stack(block: int, growth: Growth) -> int:
    """All blocks, then all blocks again."""
    return block % growth.start.layers


def in_place(block: int, growth: Growth) -> int:
    """Every copy behind its block."""
    return block // (growth.spec.layers // growth.start.layers)


def made_of(order: Order, old: float = 1.0, new: float = 1.0) -> Callable[[Growth], mu.Run]:
    """A method: the order of its blocks, and what the writers of old and of new blocks are multiplied by."""

    def make(growth: Growth) -> mu.Run:
        run = growth.fresh()
        sources = [order(block, growth) for block in range(growth.spec.layers)]
        later = [block for block, source in enumerate(sources) if source in sources[:block]]
        first = [block for block in range(growth.spec.layers) if block not in later]
        state = copied_blocks(dict(growth.base.model.state_dict()), sources)
        state = with_writers(with_writers(state, first, old), later, new)
        run.model.load_state_dict(state)
        return run

    return make


def copied_blocks(state: State, sources: list[int]) -> State:
    """The state of a deeper model whose block i is block sources[i] of the base."""
    made = {name: value for name, value in state.items() if ".layers." not in name}
    for block, source in enumerate(sources):
        start, end = f"model.layers.{source}.", f"model.layers.{block}."
        made |= {
            end + name.removeprefix(start): value for name, value in state.items() if name.startswith(start)
        }
    return made


def with_writers(state: State, blocks: Iterable[int], factor: float) -> State:
    """The same, where what these blocks write is multiplied by a factor."""
    names = [f"model.layers.{block}.{writer}" for block in blocks for writer in WRITERS]
    return {**state, **{name: factor * state[name] for name in names}}


RATES = (0.25, 0.5)
METHODS = tuple(
    Method(name, label, source, "depth", make, rates=rates)
    for name, label, source, make, rates in (
        ("stack", "G_stack", "arXiv 2405.15319", made_of(in_stack), RATES),
        ("interposed", "each block twice", "arXiv 2510.08008", made_of(in_place), (0.25,)),
        (
            "half_steps",
            "each block twice, writers halved",
            "arXiv 1710.10348",
            made_of(in_place, 0.5, 0.5),
            (0.25,),
        ),
        ("llama_pro", "LLaMA Pro", "arXiv 2401.02415", made_of(in_place, new=0.0), RATES),
        (
            "stack_third",
            "G_stack, new writers × 0.3",
            f"{OURS}, a variant",
            made_of(in_stack, new=0.3),
            (0.25,),
        ),
        (
            "stack_asleep",
            "G_stack, new writers × 0",
            f"{OURS}, a variant",
            made_of(in_stack, new=0.0),
            (0.25,),
        ),
    )
)
