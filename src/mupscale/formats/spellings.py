"""How Megatron and torchtitan call and lay out the tensors of a Llama, in terms of the stock names of Hugging Face.

Megatron keeps query, key and value of a group of heads in one tensor, and gate below up; torchtitan's Llama turns neighbouring
rows of queries and keys, where the stock one turns the halves of a head. Only names, shapes and sizes of heads decide here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import Fault
from .snapshot import Filed, Heads, Made, Snapshot, joined

_Make = Callable[[Filed, Heads], Filed | None]


def _whole(tensor: Filed, _: Heads) -> Filed | None:
    return tensor


def _made_from(make: _Make, heads: Heads, held: Sequence[Filed]) -> Filed | None:
    return make(held[0], heads)


def _half(at: int) -> _Make:
    def made(tensor: Filed, _: Heads) -> Filed | None:
        half, odd = divmod(tensor.shape[0], 2) if tensor.shape else (0, 1)
        return None if odd else tensor.rows(at * half, half)

    return made


def _grouped(part: int) -> _Make:
    """Queries, keys or values of rows that are group by group: queries, key, value."""

    def made(tensor: Filed, heads: Heads) -> Filed | None:
        many = heads.queries // heads.keys
        length = (many + 2) * heads.size
        if not tensor.shape or tensor.shape[0] != heads.keys * length:
            return None
        first, count = (0, many) if part == 0 else (many + part - 1, 1)
        rows = range(first * heads.size, heads.keys * length, length)
        return joined([tensor.rows(at, count * heads.size) for at in rows])

    return made


def _paired(tensor: Filed, heads: Heads) -> Filed | None:
    """Rows of every head as the stock Llama has them: first those that torchtitan has at even places."""
    if not tensor.shape or tensor.shape[0] not in (heads.queries * heads.size, heads.keys * heads.size):
        return None
    starts = (head + odd for head in range(0, tensor.shape[0], heads.size) for odd in (0, 1))
    return joined([tensor.rows(start, heads.size // 2, 2) for start in starts])


@dataclass(frozen=True)
class Spelling:
    """The names of one trainer."""

    trainer: str
    mark: str
    """A tensor that every model has."""
    layers: str
    modules: Mapping[str, str]
    """Modules outside of layers, and what the stock model calls them."""
    inside: Mapping[str, Mapping[str, _Make]]
    """Modules of a layer, and the stock modules that are made from them."""
    kinds: frozenset[str] | None = None
    """The stock types that are laid out like this; None where the type does not matter."""

    def made(self, names: Iterable[str], heads: Heads) -> dict[str, Made]:
        """How the tensors with stock names are made from those with the trainer's."""
        found: dict[str, Made] = {}
        for name in names:
            module, _, leaf = name.rpartition(".")
            layer, _, inner = module.removeprefix(self.layers).partition(".")
            if module in self.modules:
                found[f"{self.modules[module]}.{leaf}"] = Made((name,), partial(_made_from, _whole, heads))
            elif module.startswith(self.layers) and layer.isdigit() and inner in self.inside:
                for stock, make in self.inside[inner].items():
                    own = f"model.layers.{layer}.{stock}.{leaf}"
                    found[own] = Made((name,), partial(_made_from, make, heads))
        return found


MEGATRON = Spelling(
    "Megatron",
    "embedding.word_embeddings.weight",
    "decoder.layers.",
    {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    },
    {
        "input_layernorm": {"input_layernorm": _whole},
        "self_attention.linear_qkv": {
            "self_attn.q_proj": _grouped(0),
            "self_attn.k_proj": _grouped(1),
            "self_attn.v_proj": _grouped(2),
        },
        "self_attention.linear_proj": {"self_attn.o_proj": _whole},
        "self_attention.q_layernorm": {"self_attn.q_norm": _whole},
        "self_attention.k_layernorm": {"self_attn.k_norm": _whole},
        "pre_mlp_layernorm": {"post_attention_layernorm": _whole},
        "mlp.linear_fc1": {"mlp.gate_proj": _half(0), "mlp.up_proj": _half(1)},
        "mlp.linear_fc2": {"mlp.down_proj": _whole},
    },
)
TORCHTITAN = Spelling(
    "torchtitan",
    "tok_embeddings.weight",
    "layers.",
    {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "lm_head": "lm_head"},
    {
        "attention_norm": {"input_layernorm": _whole},
        **{
            f"attention.{within}{own}": {f"self_attn.{stock}_proj": make}
            for within in ("", "qkv_linear.")
            for own, stock, make in (("wq", "q", _paired), ("wk", "k", _paired), ("wv", "v", _whole))
        },
        "attention.wo": {"self_attn.o_proj": _whole},
        "ffn_norm": {"post_attention_layernorm": _whole},
        "feed_forward.w1": {"mlp.gate_proj": _whole},
        "feed_forward.w3": {"mlp.up_proj": _whole},
        "feed_forward.w2": {"mlp.down_proj": _whole},
    },
    frozenset({"llama"}),
)


def spelling_of(one: Snapshot) -> tuple[Spelling, str] | None:
    """Whose names a snapshot has, and what stands before them; None for stock names and for unknown ones."""
    for spelling in (MEGATRON, TORCHTITAN):
        marked = (name for name in one.names if f".{name}".endswith(f".{spelling.mark}"))
        for before in (name.removesuffix(spelling.mark) for name in marked):
            if any(name.startswith(before + spelling.layers) for name in one.names):
                return spelling, before
    return None


def with_stock_names(one: Snapshot, spelling: Spelling, heads: Heads | None) -> Snapshot | Fault:
    """The same checkpoint with the stock names, or what keeps it from being given them."""
    if heads is None or (spelling.kinds is not None and heads.kind not in spelling.kinds):
        kinds = "" if spelling.kinds is None else f" of the type {', '.join(sorted(spelling.kinds))}"
        what = f"{spelling.trainer} lays out attention by heads, and no config.json{kinds} tells their sizes"
        return Fault("same.heads_unknown", str(one.path), what, "pass config=, the config.json of the model")
    made = spelling.made(one.names, heads)
    tensors = {**one.masters, **one.weights}
    odd = [name for name, how in made.items() if how.sources[0] in tensors and how.of(tensors) is None]
    if odd:
        what = f"{made[odd[0]].sources[0]} has another shape than heads of {heads.size} rows make up"
        return Fault(
            "same.heads_do_not_fit", str(one.path), what, "pass config=, the config.json of the model"
        )
    return one.remade(made)
