"""The models that are studied, each with its sizes and a store of its own: an MLP, text, images, and a GPT-2 on the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..data import CACHE
from ..setting import Setting
from ..store import RESULTS, Store
from .settings import images, stock, text
from .settings.mlp import made_up, task
from .sizes import HERE, IMAGES, LARGE, LAYERNORM, SMOKE, SMOKE_IMAGES, SMOKE_TEXT, TEXT, Sizes
from .spec import Spec
from .train import BATCHES, Trainer


@dataclass(frozen=True)
class Study:
    """A model of any size with its data. Several processes may train, each another study."""

    name: str
    file: str
    sizes: Sizes
    setting: Callable[[Spec], Setting]
    """Only that of the MLP depends on the spec: on its number of layers."""
    earlier: tuple[str, ...] = ()
    """Files whose runs count as stored; new ones go to `file`."""
    elsewhere: str | None = None
    """The file in which another study stores runs of the same model, under its number of layers."""
    nats: bool = False
    """Whether losses are compared by their difference; else by their ratio."""
    batches: int = BATCHES
    """Training batches of the losses around growth, and of the proof."""

    def trainer(self, results: Path = RESULTS, cache: Path = CACHE / "reproduce") -> Trainer:
        """Weights are kept in a folder with the name of the store."""
        path = results / self.file
        other = None if self.elsewhere is None else Store(results / self.elsewhere)
        same = None if other is None else lambda spec: other.known(spec.with_layers(text.LAYERS).key)
        store = Store(path, earlier=[results / name for name in self.earlier])
        return Trainer(store, cache / path.stem, self.setting, elsewhere=same, batches=self.batches)


STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        Study("mlp", "frontier_widths.jsonl", HERE, lambda spec: task(spec.layers), ("frontier.jsonl",)),
        Study(
            "text",
            "frontier_text.jsonl",
            TEXT,
            lambda spec: text.task(),
            elsewhere="directions.jsonl",
            nats=True,
        ),
        Study("images", "frontier_images.jsonl", IMAGES, lambda spec: images.task()),
        Study(
            "layernorm",
            "frontier_layernorm.jsonl",
            LAYERNORM,
            lambda spec: text.task(build=text.gpt2),
            nats=True,
        ),
        Study(
            "large",
            "frontier_large.jsonl",
            LARGE,
            lambda spec: stock.setting(spec, reference=64, rows=8, context=128, held_rows=32),
            nats=True,
        ),
    )
}
SMALLEST: Mapping[str, Study] = {
    study.name: study
    for study in (
        Study(
            "mlp",
            "frontier.jsonl",
            SMOKE,
            lambda spec: task(spec.layers, made_up, SMOKE.reference),
            batches=2,
        ),
        Study(
            "text",
            "frontier_text.jsonl",
            SMOKE_TEXT,
            lambda spec: text.task(text.made_up, SMOKE_TEXT.reference, measured=1, held_rows=8),
            nats=True,
            batches=1,
        ),
        Study(
            "images",
            "frontier_images.jsonl",
            SMOKE_IMAGES,
            lambda spec: images.task(images.made_up, SMOKE_IMAGES.reference, size=64),
            batches=1,
        ),
    )
}
"""The same on made-up data, as small as they run."""


DIRECTIONS = "directions"
"""The Llama of the text as a stock model, that gets blocks and experts, and a Mixtral that gets more of them."""


def directions_trainer(
    results: Path = RESULTS,
    cache: Path = CACHE / "reproduce",
    setting: Callable[[Spec], Setting] = stock.setting,
) -> Trainer:
    return Trainer(Store(results / f"{DIRECTIONS}.jsonl"), cache / DIRECTIONS, setting)
