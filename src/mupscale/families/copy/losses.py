"""A batch and a loss for any transformers model, from the signature of its forward pass.

The loss is a fixed smooth function of every floating output. Outputs that grow with the width enter through
averages of nonlinear functions over the growing axis. Copies do not change such averages, in any layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MupscaleError
from ...proofs.identity import Loss
from ..config.fields import FIELDS
from ..config.nested import nested_configs
from ..models import Config, as_data, quiet
from ..types.rows import row_for
from .arguments import entities, parts, series, videos
from .images import GRID, Batch, beside_text, images

_BATCH, _LENGTH = 3, 11
_MASKS = ("input_features_mask", "feature_attention_mask")


class NoBatchError(MupscaleError):
    """No batch is known that a model accepts."""


def batches(model: nn.Module, config: Config, seed: int = 0) -> Iterator[Batch]:
    """Batches that the model may accept, likeliest first."""
    accepted = set(inspect.signature(model.forward).parameters)
    data = as_data(config)
    generator = torch.Generator().manual_seed(seed)
    merged: dict[str, Any] = {}
    for _, part in reversed(list(nested_configs(data))):
        merged.update({k: v for k, v in part.items() if v is not None})
    words = _words(data, merged)
    ids = words[torch.randint(len(words), (_BATCH, _LENGTH), generator=generator)]
    base: Batch = {
        **row_for(config.model_type).inputs,
        **({"use_cache": False} if "use_cache" in accepted else {}),
    }
    main = getattr(model, "main_input_name", "input_ids")
    required = inspect.signature(model.forward).parameters.get("input_ids")
    other = main in ("pixel_values", "input_values", "input_features")
    if required is not None and (not other or required.default is inspect.Parameter.empty):
        base["input_ids"] = ids
        base |= entities(accepted, ids)
    if "decoder_input_ids" in accepted:
        base["decoder_input_ids"] = ids.flip(1)[:, :7].contiguous()
    options: list[Batch] = [{}]
    for name, make in (("input_values", _waves), ("input_features", _features)):
        if name in accepted:
            options = [{**o, name: value} for value in make(merged, generator) for o in options]
    if "global_attention_mask" in accepted and "input_ids" in base:
        base["global_attention_mask"] = (torch.arange(_LENGTH) < 1).long().expand(_BATCH, -1)
    if "input_features" in accepted and "input_ids" in accepted:
        heard = _masked(accepted, merged, generator)
        yield from _beside_text(model, {**base, "input_ids": ids}, heard, merged, "audio")
    if accepted & {"pixel_values", GRID}:
        seen = list(images(accepted, merged, _BATCH, generator))
        if "input_ids" in base:
            texts = list(_beside_text(model, base, seen, merged, "image"))
            shown = list(videos(accepted, merged, _BATCH, generator))
            yield from _beside_text(model, texts[0] if texts else base, shown, merged, "video")
            yield from texts
        options = [{**o, **given} for given in seen for o in options]
    for option in options:
        yield {**base, **option}
    if "pixel_values" in accepted and main == "input_ids":
        yield base
    for given in (
        *parts(accepted, merged, main, _BATCH, generator),
        *series(accepted, merged, _BATCH, generator),
        *videos(accepted, merged, _BATCH, generator),
    ):
        yield {**base, **given}


def _beside_text(
    model: nn.Module, base: Batch, given: Iterable[Batch], merged: Mapping[str, Any], kind: str
) -> Iterator[Batch]:
    """Texts with the images, or the sound, that a model accepts between their words."""
    token = merged.get(f"{kind}_token_id", merged.get(f"{kind}_token_index"))
    accepted = set(inspect.signature(model.forward).parameters)
    for one in given if type(token) is int else ():
        if (texts := beside_text(model, one, base["input_ids"], token, kind)) is not None:
            yield {**base, **{name: value for name, value in texts.items() if name in accepted}}


def _masked(accepted: set[str], merged: Mapping[str, Any], generator: torch.Generator) -> Iterator[Batch]:
    """Sound as features, with the mask that says that all of it counts where a model takes one."""
    mask = next((name for name in _MASKS if name in accepted), None)
    for sound in _features(merged, generator):
        for dim in (2, 1) if mask else ():
            yield {"input_features": sound, str(mask): torch.ones(_BATCH, sound.shape[dim], dtype=torch.long)}
        yield {"input_features": sound}


def _words(data: Mapping[str, Any], merged: Mapping[str, Any]) -> Tensor:
    """Ids of ordinary tokens: no padding, no image tokens, no end tokens."""
    sizes = [
        v
        for _, p in nested_configs(data)
        for k, v in p.items()
        if k in FIELDS["words"].main and type(v) is int
    ]
    special = {
        v
        for _, p in nested_configs(data)
        for k, v in p.items()
        if k.endswith(("token_id", "token_index")) and type(v) is int
    }
    allowed = [i for i in range(3, min(sizes, default=64)) if i not in special]
    return torch.tensor(allowed or [0])


def _waves(merged: Mapping[str, Any], generator: torch.Generator) -> Iterator[Tensor]:
    mels, length = merged.get("num_mel_bins"), merged.get("max_length")
    if type(mels) is int and type(length) is int:
        yield torch.randn(_BATCH, length, mels, generator=generator, dtype=torch.float64)
    yield torch.randn(_BATCH, 2400, generator=generator, dtype=torch.float64)
    yield torch.randn(_BATCH, 1, 2400, generator=generator, dtype=torch.float64)


def _features(merged: Mapping[str, Any], generator: torch.Generator) -> Iterator[Tensor]:
    mels = next(
        (
            merged[k]
            for k in (
                "num_mel_bins",
                "feature_size",
                "input_feat_per_channel",
                "input_size",
                "feature_projection_input_dim",
                "input_dim",
            )
            if type(merged.get(k)) is int
        ),
        80,
    )
    source = merged.get("max_source_positions")
    if type(source) is int:
        yield torch.randn(_BATCH, mels, 2 * source, generator=generator, dtype=torch.float64)
    yield torch.randn(_BATCH, 40, mels, generator=generator, dtype=torch.float64)
    yield torch.randn(_BATCH, mels, 40, generator=generator, dtype=torch.float64)
    yield torch.randn(_BATCH, 40, 4 * mels, generator=generator, dtype=torch.float64)  # stacked, with deltas


def find_batch(model: nn.Module, config: Config) -> tuple[Batch, int]:
    """A batch that the model accepts and its option number; raises one error with the model's own message."""
    first: Exception | None = None
    for which, batch in enumerate(batches(model, config)):
        try:
            with torch.no_grad(), quiet():
                if list(tensors_in(model(**cast_to(model, batch)))):
                    return batch, which
        except Exception as error:
            first = first or error
    said = (
        f"{type(first).__name__}: {str(first).splitlines()[0][:200]}" if first and str(first) else repr(first)
    )
    raise NoBatchError(
        f"no batch is known that {type(model).__name__} accepts; it says {said}", code="model.no_batch_known"
    )


def batch_for(model: nn.Module, config: Config) -> Batch:
    """A batch that the model accepts; raises one error with the model's message about the likeliest batch."""
    return find_batch(model, config)[0]


def another_batch(model: nn.Module, config: Config, which: int, seed: int) -> Batch:
    """A batch like the one that `find_batch` found, with other numbers."""
    return next(islice(batches(model, config, seed), which, None))


def cast_to(model: nn.Module, batch: Batch) -> Batch:
    """The batch with floating values in the dtype of the model."""
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {k: v.to(kind) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def tensors_in(output: Any, path: str = "", every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every floating tensor of an output, or `every` tensor, by its place in it; caches are left out."""
    if isinstance(output, Tensor):
        if every or output.is_floating_point():
            yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if "past_key_values" not in str(key) and "cache" not in str(key):
                yield from tensors_in(value, f"{path}.{key}", every)
    elif isinstance(output, (list, tuple)):
        for i, value in enumerate(output):
            yield from tensors_in(value, f"{path}.{i}", every)


def growing_outputs(base: nn.Module, wide: nn.Module, batch: Batch) -> dict[str, list[int]]:
    """Along which dimensions the outputs that count grow, known by their shapes: both models run once."""
    read = row_for(str(getattr(getattr(base, "config", None), "model_type", None))).reads
    try:
        with torch.no_grad(), quiet():
            pair = [
                {path: tuple(t.shape) for path, t in tensors_in(m(**cast_to(m, batch)))} for m in (base, wide)
            ]
    except (RuntimeError, ValueError, IndexError) as error:
        raise MupscaleError(
            f"{type(wide).__name__} does not run when all its widths grow, so one of its sizes does not follow; it says "
            f"{str(error).splitlines()[0][:200]}",
            code="model.does_not_run_wide",
        ) from error
    if {p: len(s) for p, s in pair[0].items()} != {p: len(s) for p, s in pair[1].items()}:
        raise MupscaleError(
            "base and wide model return different outputs", code="model.other_outputs_when_wide"
        )
    return {
        path: [d for d, (a, b) in enumerate(zip(shape, pair[1][path], strict=True)) if a != b]
        for path, shape in pair[0].items()
        if not read or path.split(".")[1] in read
    }


def loss_for(base: nn.Module, wide: nn.Module, batch: Batch, words: tuple[int, int] | None = None) -> Loss:
    """A deterministic loss of one batch that base and wide models share."""
    return loss_on(batch, growing_outputs(base, wide, batch), words)


def loss_on(batch: Batch, growing: Mapping[str, list[int]], words: tuple[int, int] | None = None) -> Loss:
    """The loss of a batch when it is known along which dimensions outputs grow.

    `words` says how many words the two models have, where the wide one has more: the loss is over those of the base.
    """

    def loss(model: nn.Module) -> Tensor:
        with quiet():
            output = model(**cast_to(model, batch))
        total: Any = 0.0
        for i, (path, t) in enumerate(tensors_in(output)):
            if path not in growing:
                continue
            counted = [d for d in growing[path] if words is not None and t.shape[d] in words]
            for dim in counted:
                t = t.narrow(dim, 0, min(words or ()))
            mean = [d for d in growing[path] if d not in counted]
            x = torch.asinh(torch.where(t.isfinite(), t, torch.zeros_like(t)).double())
            views = [x] if not mean else [f(x).mean(mean) for f in (_same, torch.square, torch.cos)]
            for j, view in enumerate(views):
                generator = torch.Generator().manual_seed(1000 * i + j)
                weights = torch.randn(view.shape, generator=generator, dtype=torch.float64)
                total = total + (weights * view).sum() / max(view.numel(), 1) ** 0.5
        assert isinstance(total, Tensor)
        return total

    return loss


def _same(x: Tensor) -> Tensor:
    return x
