"""A small copy of a configuration, made of the same blocks.

The inside of a block stays: head size, query heads per key head, state and kernel sizes. The number of
blocks, layers, tokens, positions and experts shrinks. A step is taken only if the model still builds and its
tensors have the same names (up to numbers) and grow along the same dimensions, so that the plan of the copy can
be lifted.

Llama 70B, doubled, becomes a copy of 0.5 M parameters:

    field                      full      copy   why this number
    num_hidden_layers            80         2   the fewest that are tried
    vocab_size              128,256       131
    max_position_embeddings   8,192        40
    num_key_value_heads           8         2   two key heads ...
    num_attention_heads          64        16   ... with 8 query heads each, as before; head_dim stays 128
    hidden_size               8,192        48   56 is tried first; Llama wants a multiple of its heads
    intermediate_size        28,672        44

A q_proj of the copy has 16 · 128 = 2,048 rows, and the search finds "2x2 * 1024": blocks of 8 query heads,
one per key head. `lift` turns that into the "8x2 * 1024" of the full model's 8,192 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, prod
from typing import Any, NamedTuple

from ...errors import MupscaleError
from ...models.names import named_tensors, pattern_of
from ..config.fields import FIELDS
from ..config.goal import Goal, small_goals
from ..config.grown import grown
from ..config.nested import Path, following, growing_fields, kept_first, nested_configs, with_edits
from ..models import Config, as_data, config_from, on_meta
from ..types.rows import row_for
from ..types.symbols import explicit_head_size, symbols

Shapes = Mapping[str, tuple[int, ...]]
Growth = dict[str, set[tuple[tuple[int, bool], ...]]]
"""Name pattern -> for every dimension of its tensors, how many times it is copied and whether zeros follow."""

LARGEST = 60_000_000
"""Parameters of the grown copy, above which a model is refused: 0.5 GB in float64, and as much for gradients and for what is expected of them."""
TOO_LARGE = "family.small_copy_too_large"

# Sizes of the copy, chosen by hand and tried in this order until a model builds. 44 and 56 come first because
# they equal no other size of a usual copy, so its shapes show which width an axis has; the rest are for
# models that require a multiple of some number. Vocabulary sizes are odd, so they are not a multiple of a
# width.
_FFN = (44, 40, 48, 64, 96)
_STREAM = (56, 48, 64, 96, 128)
_WORD_COUNTS = (131, 259)
_LEAST = 8  # a norm over fewer channels is badly conditioned


def shapes(config: Config, cls: Any) -> Shapes:
    """The shape of every tensor of a model, by name, ties repeated."""
    return {name: tuple(t.shape) for name, _, t in named_tensors(on_meta(config, cls))}


def growth(base: Shapes, wide: Shapes) -> Growth:
    """Which dimensions grow, and how, by name pattern; the two models must have the same tensor names.

    >>> growth({"h.0.w": (4, 3), "h.1.w": (4, 3)}, {"h.0.w": (8, 5), "h.1.w": (8, 5)})
    {'h.*.w': {((2, False), (1, True))}}
    """
    if base.keys() != wide.keys():
        odd = sorted(base.keys() ^ wide.keys())
        raise MupscaleError(
            f"growing changes the tensors of the model: {', '.join(odd[:4])}",
            code="family.growth_changes_tensors",
        )
    found: Growth = {}
    for name, shape in base.items():
        if len(shape) != len(wide[name]) or any(b < a for a, b in zip(shape, wide[name], strict=True)):
            raise MupscaleError(
                f"{name} goes from {shape} to {wide[name]}, which is no growth", code="family.tensor_shrinks"
            )
        pairs = [divmod(b, max(a, 1)) for a, b in zip(shape, wide[name], strict=True)]
        found.setdefault(pattern_of(name), set()).add(tuple((k, bool(rest)) for k, rest in pairs))
    return found


def growth_of(config: Config, goal: Goal, cls: Any) -> Growth:
    """How the tensors of a configuration grow by a goal."""
    return growth(shapes(config, cls), shapes(grown(config, goal), cls))


def count(found: Shapes) -> int:
    """The number of entries of all tensors, ties counted twice."""
    return sum(prod(shape) for shape in found.values())


def shrunk(config: Config, goal: Goal, cls: Any, kept: Growth, gently: bool = False) -> Config:
    """The small copy: `kept` is how the full model grows, and the copy grows the same way.

    `gently` keeps more: images, at least four heads, heads times head size = hidden size where that holds, and feed-forward
    layers that are a multiple of the stream. Refuses if the copy is still too large to be tested in float64.
    """
    # Greedy: each step takes its first option that leaves the same kind of model, or is left out.
    data, wanted = as_data(config), _Wanted(goal, as_data(config), cls, kept)
    for options in _steps(data, gently):
        for option in options:
            trial = with_edits(data, option(data) if callable(option) else option)
            trial = with_edits(trial, following(trial, data))
            if trial != data and _same(trial, data, wanted):
                data = trial
                break
    small = config_from(data)
    size = count(shapes(grown(small, goals_of(goal, as_data(config), data)[0]), cls))
    if size > LARGEST:
        raise MupscaleError(
            f"the smallest copy of this configuration that keeps its blocks has {size / 1e6:.0f} M parameters when "
            f"grown, too many to test in float64 (limit {LARGEST / 1e6:.0f} M)",
            code=TOO_LARGE,
        )
    return small


def goals_of(goal: Goal, full: Mapping[str, Any], small: Mapping[str, Any]) -> list[Goal]:
    """The goals with which a small copy of a configuration grows as the full one does; two where there are zeros."""
    fields = [name for _, part in nested_configs(full) for name in growing_fields(part).get("ffn", ())]
    return list(small_goals(goal, full, small, fields[0] if fields else None))


class _Wanted(NamedTuple):
    """What a small copy is made for."""

    goal: Goal
    full: Mapping[str, Any]
    cls: Any
    kept: Growth


def _same(trial: dict[str, Any], before: dict[str, Any], wanted: _Wanted) -> bool:
    """True when the trial builds, grows like the full model in every way and has lost no kind of layer."""
    if _kinds(trial) != _kinds(before):
        return False
    try:
        small = config_from(trial)
        return all(
            growth_of(small, goal, wanted.cls) == wanted.kept
            for goal in goals_of(wanted.goal, wanted.full, as_data(small))
        )
    except MupscaleError:
        return False


def _kinds(data: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """The kinds of layer that a configuration lists, so that none is lost with its layers.

    Two layers of this Gemma would all be sliding; six keep a full one:

    >>> def gemma(layers: int) -> dict[str, object]:
    ...     kinds = ["sliding_attention"] * 5 + ["full_attention"]
    ...     return {"num_hidden_layers": layers, "layer_types": (kinds * 5)[:layers]}
    >>> _kinds(gemma(2)) == _kinds(gemma(30)), _kinds(gemma(6)) == _kinds(gemma(30))
    (False, True)
    """
    found = set()
    for path, part in nested_configs(data):
        layers = {v for k, v in part.items() if FIELDS["layers"].has(k) and type(v) is int}
        for key, value in part.items():
            if (
                isinstance(value, list)
                and len(value) in layers
                and all(isinstance(v, str) or (isinstance(v, int) and "layer" in key) for v in value)
            ):
                found |= {(*path, key, v) for v in value}
    return found


def _steps(data: Mapping[str, Any], gently: bool) -> Iterator[list[Any]]:
    """Every step with its options, smallest copy first. An option is a set of edits, or a function that makes one.

    Functions see the configuration as earlier steps left it: a list with one entry per layer has been cut by
    then.
    """
    for path, _ in nested_configs(data):
        # Two layers are a first and a last one. More are for patterns of layer types, none of which may be
        # lost: ModernBERT's every 3rd, SmolLM3's 4th, Gemma 3's 6th and Jamba's 8th layer is of another type.
        yield [_fewer_layers(path, count) for count in (2, 3, 4, 6, 8, 12)]
    for path, part in nested_configs(data):
        yield [_fewer_words(path, words) for words in _WORD_COUNTS]
        for key, value in part.items():
            # Test batches have 11 tokens, and some audio inputs 40 frames.
            if FIELDS["positions"].has(key) and type(value) is int and value > 40:
                yield [{(*path, key): n} for n in (40, 64, 128)]
            if FIELDS["experts"].has(key) and type(value) is int and value > 4:
                # The copy keeps more experts than a token goes to, so that routing still chooses.
                chosen = max(
                    (v for k, v in part.items() if FIELDS["top_k"].has(k) and type(v) is int and v <= value),
                    default=1,
                )
                # Where groups of experts are chosen first, each is scored by its best two.
                groups = max(
                    (v for k, v in part.items() if FIELDS["groups"].has(k) and type(v) is int), default=1
                )
                least = 2 * groups if groups > 1 else 1
                yield [{(*path, key): n} for n in (4, 8, 16, 32) if n > chosen and n >= least]
    for path, part in nested_configs(data):
        yield from _narrower(path, part, gently)
        if not gently:
            yield from _smaller_image(path, part)


def _fewer_layers(path: Path, layers: int) -> Any:
    """The option of at most `layers` layers; lists with one entry per layer are cut too.

    >>> _fewer_layers((), 2)({"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"]})
    {('num_hidden_layers',): 2, ('layer_types',): ['a', 'b']}
    """

    def option(data: Mapping[str, Any]) -> dict[Path, Any]:
        part = _at(data, path)
        changed: dict[Path, Any] = {}
        for key, value in part.items():  # stages, each with its number of layers
            if FIELDS["stages"].has(key) and isinstance(value, list) and all(type(v) is int for v in value):
                changed[(*path, key)] = [min(v, layers) for v in value]
        if (*path, "depths") in changed:
            return changed
        for key, value in part.items():
            counts = FIELDS["layers"].has(key) or FIELDS["stages"].has(key)
            if counts and type(value) is int and value > layers:
                places = _fewer_places(part, value, layers) if FIELDS["stages"].has(key) else {}
                if places is None:
                    continue
                changed |= {(*path, name): new for name, new in places.items()}
                changed[(*path, key)] = layers
                for other, entries in part.items():
                    if isinstance(entries, list) and len(entries) == value:
                        changed[(*path, other)] = entries[:layers]
                changed |= {(*path, name): new for name, new in _fewer_stages(part, value, layers).items()}
        return changed

    return option


def _fewer_places(part: Mapping[str, Any], now: int, layers: int) -> dict[str, Any] | None:
    """The lists that say by numbers which layers are special, in fewer layers; None where not both kinds would be left.

    >>> eye = {"depth": 27, "deepstack_visual_indexes": [8, 16, 24]}
    >>> _fewer_places(eye, 27, 4), _fewer_places(eye, 27, 3)
    ({'deepstack_visual_indexes': [1, 2, 3]}, None)
    """
    found = {
        name: len(value)
        for name, value in part.items()
        if isinstance(value, list)
        and name.endswith(("indexes", "indices", "idxs", "blocks", "layers"))
        and len(value) < now
        and all(type(v) is int and 0 <= v < now for v in value)
    }
    if any(number >= layers for number in found.values()):
        return None
    return {name: [*range(layers - number, layers)] for name, number in found.items()}


def _fewer_stages(part: Mapping[str, Any], now: int, layers: int) -> dict[str, Any]:
    """The names of layers, and those that are read, where every layer is a stage: the last ones are read then.

    >>> part = {"stage_names": ["stem", "stage1", "stage2", "stage3"], "out_features": ["stage3"], "out_indices": [3]}
    >>> _fewer_stages(part, 3, 2)
    {'stage_names': ['stem', 'stage1', 'stage2'], 'out_features': ['stage2'], 'out_indices': [2]}
    """
    stages, read = part.get("stage_names"), part.get("out_features")
    if not (isinstance(stages, list) and isinstance(read, list) and len(stages) == now + 1):
        return {}
    places = [*range(layers + 1)][-len(read) :]
    return {
        "stage_names": stages[: layers + 1],
        "out_features": [stages[place] for place in places],
        "out_indices": places,
    }


def _fewer_words(path: Path, words: int) -> Any:
    """The option of a vocabulary of `words` tokens; ids of special tokens move to its end.

    So do those that are outside of a vocabulary that is small already, since a batch can place no others:

    >>> _fewer_words((), 131)({"vocab_size": 50257, "bos_token_id": 50256, "pad_token_id": 0})
    {('vocab_size',): 131, ('bos_token_id',): 130}
    >>> _fewer_words((), 131)({"vocab_size": 96, "image_token_id": 32000})
    {('image_token_id',): 95}
    """

    def option(data: Mapping[str, Any]) -> dict[Path, Any]:
        part = _at(data, path)
        field = FIELDS["words"]
        now = {key: v for key, v in part.items() if field.has(key) and type(v) is int and v > 0}
        changed: dict[Path, Any] = {(*path, key): words for key, v in now.items() if v > words}
        sizes = [min(v, words) for key, v in now.items() if v > words or key in field.main]
        if not sizes:
            return {}
        last = least = min(sizes)
        for where, other in nested_configs(data):
            for key, value in other.items():
                if FIELDS["token"].has(key) and type(value) is int and value >= least:
                    last -= 1  # each special token gets a different id
                    changed[(*where, key)] = last
                elif (
                    FIELDS["token"].has(key)
                    and isinstance(value, list)
                    and any(type(v) is int and v >= least for v in value)
                ):
                    changed[(*where, key)] = [2]
        return changed

    return option


def _narrower(path: Path, part: Mapping[str, Any], gently: bool) -> Iterator[list[Any]]:
    """Fewer heads of the same size, a narrower stream, narrower feed-forward layers.

    The stream has its own size where the head size is a field (Llama), and follows from the heads where it is
    hidden / heads (GPT-2: 12 heads of 64 become 2 heads and 128 channels):

    >>> gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_inner": None}
    >>> [edits for options in _narrower((), gpt2, False) for edits in options][0]
    {('n_head',): 2, ('n_embd',): 128}
    """
    names, fields, row = symbols(part), growing_fields(part), row_for(str(part.get("model_type")))
    # A row may name fields that only shrink by a common divisor (Mamba-2's hidden size and heads).
    if row.divides:
        few = {(*path, n): gcd(part[n], 2) for n in fields["heads"] if n not in row.divides}
        factor, least = gcd(*(part[n] for n in row.divides)), 4 * max(few.values(), default=1)
        key = set(fields.get("kv_heads", ()))
        divisors = [
            f
            for f in range(factor, 1, -1)
            if factor % f == 0 and all(part[n] // f >= (2 if n in key else least) for n in row.divides)
        ]
        yield [few | {(*path, n): part[n] // f for n in row.divides} for f in divisors]
    heads, kv, stream = (fields.get(width, []) for width in ("heads", "kv_heads", "hidden"))
    listed = any(isinstance(part[n], list) for n in (*heads, *kv, *stream))
    product = names.get("H", 0) * names.get("D", 0)
    tied = bool(heads) and (not explicit_head_size(part) or (gently and product == names.get("E")))
    main = [n for n in stream if part[n] == names.get("E")]
    if heads and not listed and {part[n] for n in heads} == {names.get("H")}:
        options = []
        for count in (4, 8) if gently else (2, 3, 4, 1):
            few = {(*path, n): count * names["G"] for n in heads} | {(*path, n): count for n in kv}
            if tied:
                few |= {(*path, n): count * names["G"] * names["D"] for n in main}
            if count < names["KV"]:
                options.append(few)
        yield options
    # Heads per stage (Swin: [3, 6, 12, 24]) or of unequal number: all are divided by a common divisor.
    elif listed or heads:
        together = [*heads, *kv, *(stream if tied or listed else ())]
        seen = part.get("num_channels")
        factor = gcd(*(v for n in together for v in _numbers(part[n])[kept_first(part[n], seen) :]), 0)
        least = min(
            (v for n in stream for v in _numbers(part[n])[kept_first(part[n], seen) :]), default=_LEAST
        )
        divisors = [f for f in range(factor, 1, -1) if factor % f == 0 and least // f >= _LEAST]
        yield [
            {(*path, n): _divided(part[n], f, kept_first(part[n], seen)) for n in together} for f in divisors
        ]
    if main and not tied and not listed and not {*main} & {*row.divides}:
        yield [{(*path, n): size for n in main} for size in _STREAM if size < part[main[0]]]
    for name in fields.get("ffn", ()):
        if type(part[name]) is int:
            kept = gently and main and part[name] % names["E"] == 0
            sizes = [{(*path, name): size} for size in _FFN if size < part[name]]
            yield [_in_ratio(path, name, part[name] // names["E"])] if kept else sizes
    for name in (
        () if path else FIELDS["into_text"].every
    ):  # a tower alone writes for a text that is not there
        if type(part.get(name)) is int:
            yield [{(name,): size} for size in _STREAM if size < part[name]]


def _in_ratio(path: Path, name: str, ratio: int) -> Any:
    """The option of a feed-forward layer that is as many times the stream as in the full model: some code cuts by both."""
    return lambda data: {(*path, name): ratio * symbols(_at(data, path))["E"]}


def _smaller_image(path: Path, part: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Images of 4 x 4 patches, or 8 x 8; models with stages halve their image several times and keep it."""
    size, patch = part.get("image_size"), part.get("patch_size")
    if type(size) is int and type(patch) is int and size > 4 * patch and "depths" not in part:
        yield [_image_of(path, n * patch) for n in (4, 8)]


def _image_of(path: Path, size: int) -> Any:
    """The option of images of this size; a whole that cuts its images into tiles gets the fewest of them."""

    def option(data: Mapping[str, Any]) -> dict[Path, Any]:
        tiled = "image_grid_pinpoints" in _at(data, path[:-1])
        tiles: dict[Path, Any] = {(*path[:-1], "image_grid_pinpoints"): [[size, 2 * size], [2 * size, size]]}
        return {(*path, "image_size"): size, **(tiles if tiled else {})}

    return option


def _at(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    for key in path:
        data = data[key]
    return data


def _numbers(value: Any) -> list[int]:
    """A number, or the numbers of a list."""
    return value if isinstance(value, list) else [value]


def _divided(value: Any, by: int, kept: int = 0) -> Any:
    """A number, or every number of a list behind those that are kept, divided by one that divides it."""
    if not isinstance(value, list):
        return value // by
    return [*value[:kept], *(v // by for v in value[kept:])]
