"""Load real weights in a separate process: the loss of a batch, the noise that it allows, and base against wide.

Needs memory for whole models. It is estimated before the start, and the call is refused if there is not enough.
Everything else in this room works on small copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from ..errors import MupscaleError
from ..machine import free_memory
from ..plans.plan import Plan
from ..storage.location import Location, Url
from .child import ChildDiedError, ask
from .record import FamilyPlan

_ROOM = 1.3  # activations and the libraries themselves


def check_memory(needed: float, what: str) -> None:
    """Raise unless this many bytes, and a margin for activations and libraries, are free."""
    free = free_memory()
    if needed * _ROOM > free:
        raise MupscaleError(
            f"{what} needs about {needed * _ROOM / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; "
            "run it on a larger machine, or leave this level out",
            code="model.not_enough_memory",
        )


@dataclass(frozen=True)
class WordLosses:
    """The loss of a model with new words, over the words of its base and over all words."""

    old: float
    all: float
    expected: float
    """The mean of log(1 + new/Z) over positions: what words whose logits are 0 add."""
    now: int
    new: int
    """How many words the base has, and how many the model."""

    @property
    def rise(self) -> float:
        return self.all - self.old

    def __str__(self) -> str:
        """One sentence.

        >>> print(WordLosses(1.6631, 1.6647, 0.0057, 512, 576))
        loss over the base's 512 words 1.6631, over all 576 words 1.6647: a rise of 0.0016
          words whose logits are 0 raise it by log(1 + 64/Z) = 0.0057; the mean word raises it by log(1 + 64/512) = 0.1178 at most
        """
        added = self.new - self.now
        return (
            f"loss over the base's {self.now} words {self.old:.4f}, over all {self.new} words {self.all:.4f}: a rise of "
            f"{self.rise:.4f}\n  words whose logits are 0 raise it by log(1 + {added}/Z) = {self.expected:.4f}; the mean word "
            f"raises it by log(1 + {added}/{self.now}) = {log(self.new / self.now):.4f} at most"
        )

    def as_json(self) -> dict[str, Any]:
        """As a record stores it: losses with four digits, which machines that round otherwise agree on."""
        four = {key: float(f"{getattr(self, key):.4g}") for key in ("old", "all", "expected")}
        return {**four, "now": self.now, "new": self.new}


@dataclass(frozen=True)
class Losses:
    """What noise costs: the loss before and after it, or how far it moves the outputs."""

    before: float
    after: float
    kind: str
    """"loss", or "outputs" for how far they move."""
    text: str
    """The data, in words."""
    words: WordLosses | None = None
    """What new words cost, where there are some. `after` does not count them."""
    kept: float | None = None
    """The share of tokens that keep their experts, where copies of experts part."""

    def __str__(self) -> str:
        """One sentence.

        >>> print(Losses(1.7, 1.75, "loss", "batch.json"))
        loss of batch.json: 1.7000 before noise (the base's), 1.7500 after
        >>> print(Losses(0.0, 0.02, "outputs", "random tokens"))
        outputs for random tokens: noise changes the cosines between them by 0.020 (root mean square)
        """
        if self.kind == "outputs":
            return f"outputs for {self.text}: noise changes the cosines between them by {self.after:.3f} (root mean square)"
        kept = "" if self.kept is None else f"; {self.kept:.1%} of tokens keep their experts"
        return (
            f"loss of {self.text}: {self.before:.4f} before noise (the base's), {self.after:.4f} after{kept}"
        )

    def as_json(self) -> dict[str, Any]:
        """As a record stores it: with four digits, which machines that round otherwise agree on."""
        rounded = {end: float(f"{getattr(self, end):.4g}") for end in ("before", "after")}
        kept = {} if self.kept is None else {"kept": float(f"{self.kept:.4g}")}
        return {**rounded, "kind": self.kind, "text": self.text, **kept}


def stored_losses(base: Location, wide: Location, batch: Path | None) -> Losses:
    """The losses of two directories in float32, one after the other."""
    return Losses(**_ask({"ask": "stored", "directories": [_here(base), _here(wide)], **_batch(batch)}))


def losses_with(
    base: Location,
    about: Mapping[str, Any],
    since: Plan | None,
    dtype: str,
    batch: Path | None,
) -> Losses:
    """The losses of a base and of what a record will make of it, before anything is written.

    `dtype` is the one that weights will be stored in; they are rounded to it.
    """
    found = _ask(
        {
            "ask": "planned",
            "base": _here(base),
            **_batch(batch),
            "plan": about["plan"],
            "since": None if since is None else since.as_json(),
            "noise": about["noise"],
            "config": about["config"],
            "classes": [about["base_architecture"], about["architecture"]],
            "dtype": dtype,
            "absent": about["spelling"]["absent"],
        }
    )
    words = found.pop("words")
    return Losses(**found, words=None if words is None else WordLosses(**words))


def choose_size(
    base: Location, family: FamilyPlan, since: Plan | None, rise: float | None, seed: int, batch: Path | None
) -> dict[str, Any]:
    """The noise size that costs a share of what was learned: `Choice.as_json`, with the kind of measure.

    Without `rise` it is that of `AutoNoise()`, which does not let the loss jump.
    """
    return _ask(
        {
            "ask": "noise",
            "base": _here(base),
            **_batch(batch),
            "plan": family.plan.as_json(),
            "since": None if since is None else since.as_json(),
            "config": dict(family.wide_config),
            "classes": [family.architecture, family.wide_architecture],
            "exempt": family.exempt.as_json(),
            "absent": list(family.reading.absent),
            "rise": rise,
            "seed": seed,
        }
    )


def _here(directory: Location) -> str:
    if isinstance(directory, Url):
        raise MupscaleError(
            f"transformers loads the weights of a directory of this machine, and {directory} is at a URL; copy it to a disk "
            "and name the copy",
            code="directory.not_on_this_machine",
        )
    return str(directory)


def _batch(batch: Path | None) -> dict[str, str | None]:
    return {"batch": None if batch is None else str(batch)}


def compare_models(
    base: Location, wide: Location, plan: Mapping[str, Any], architectures: Sequence[str]
) -> dict[str, Any]:
    """Outputs and gradients of the real weights, in float64: the loss gap, and the gradient error of each tensor."""
    return _ask(
        {
            "ask": "compare",
            "base": _here(base),
            "wide": _here(wide),
            "plan": dict(plan),
            "classes": list(architectures),
        }
    )


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return ask("load", request)
    except ChildDiedError as died:
        last_line = (died.said or ["no output"])[-1]
        raise MupscaleError(
            f"the process that loads the model ended with code {died.code}: {last_line}",
            code="model.loading_process_died",
        ) from None
