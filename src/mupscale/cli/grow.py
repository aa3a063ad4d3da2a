"""`mupscale grow` and `mupscale upscale`: a checkpoint directory in, a wider one out, streamed and resumable.

Prints what `checkpoints/grow_directory.py` reports. Running the same command again resumes an interrupted job.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoints.destination import existing_above
from ..checkpoints.events import (
    Event,
    Measured,
    NoiseChosen,
    NotCarried,
    NotMeasured,
    Planned,
    RecipeNotes,
    Resumed,
    RoundedAway,
    Working,
    Writing,
)
from ..checkpoints.grow_directory import Options, grow_directory
from ..checkpoints.noise_words import AUTO, DEFAULT_NOISE
from ..checkpoints.request import Request
from ..errors import MupscaleError
from ..files.strict import printable
from ..jobs.progress import Progress
from ..models.names import pattern_of
from ..rules.noise_defaults import NOT_SOON
from ..text import columns
from .plan import cost, describe, evidence, woken
from .printing.next_steps import next_steps
from .printing.working import working

if TYPE_CHECKING:
    from ..families.loaded import Losses


_RECORDED = ("architecture", "parameters", "plan_hash", "noise", "losses", "words", "not_carried")
"""What `--json` says of a growth; its record in the result says more."""


def run(chosen: argparse.Namespace, request: Request, share: tuple[int, int] | None) -> int:
    options = Options(
        architecture=chosen.architecture,
        batch=chosen.inputs,
        measure=not chosen.no_loss,
        threads=chosen.threads,
        share=share,
        dry_run=chosen.dry_run,
    )
    printer = _Printer(chosen)
    try:
        grown = grow_directory(chosen.base, chosen.out, request, options, printer)
    finally:
        printer.close()
    chosen.found = {"outcome": grown.outcome, "out": str(grown.out)}
    if grown.job is not None:
        chosen.found |= {key: grown.job.about[key] for key in _RECORDED}
    if grown.outcome == "already there":
        check = shlex.join(["mupscale", "check", str(grown.out), "--base", str(chosen.base)])
        print(f"already complete: {grown.out}\nto prove it: {check}")
    elif grown.outcome == "dry run":
        print("\ndry run: nothing was written")
    elif grown.outcome == "share written":
        print(f"share {chosen.share} is done; the worker that finishes last moves {grown.out} into place")
    else:
        assert grown.job is not None
        steps = next_steps(chosen.base, grown.out, grown.job, chosen.declare)
        print(steps.splitlines()[0] if chosen.quiet else f"\n{steps}")
    return 0


class _Printer:
    """Prints the events of a growth, and draws a bar while bytes are written."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._chosen = chosen
        self._bar: Progress | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Writing):
            self._draw(event)
            return
        self.close()
        if isinstance(event, Working):
            working(event.what, self._chosen)
        elif isinstance(event, Planned):
            self._print_plan(event)
        else:
            print(_text(event), flush=True)

    def _draw(self, event: Writing) -> None:
        if self._chosen.quiet:
            return
        self._bar = self._bar or Progress(what="writing")
        self._bar(event.done, event.total)

    def _print_plan(self, event: Planned) -> None:
        directory = event.base.directory
        if not self._chosen.quiet:
            print(
                f"{describe(directory, event.family, event.request)}\n\n{evidence(event.family)}\n",
                flush=True,
            )
        if event.request.wakes:
            print(woken(directory, event.family), flush=True)
        elif event.request.adds_noise:
            print(f"{NOT_SOON}\n", flush=True)
        if self._chosen.dry_run:
            print(cost(directory, event.family, event.request, existing_above(event.out)), flush=True)

    def close(self) -> None:
        """Leave the last state of the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _text(event: Event) -> str:
    """An event in words."""
    if isinstance(event, Resumed):
        return f"resuming {event.out}"
    if isinstance(event, NoiseChosen):
        return _choice(event.choice)
    if isinstance(event, Measured):
        words = [] if event.losses.words is None else [str(event.losses.words)]
        return "\n".join(
            [*([_costs(event.losses, event.request)] if event.request.adds_noise else []), *words]
        )
    if isinstance(event, NotMeasured):
        return _not_measured(event.error)
    if isinstance(event, NotCarried):
        rows = event.names.items()
        return "\n".join(f"not carried: {printable(name)}, because {why}" for name, why in rows)
    if isinstance(event, RoundedAway):
        return _rounding(event.shares)
    assert isinstance(event, RecipeNotes)
    rate = (
        f"the recipe's learning rate from now on, with {event.optimizer}: lr={event.lr:g} (at the reference)"
    )
    return "\n".join([rate, *(f"note: {note}" for note in event.notes)])


def _choice(choice: Mapping[str, Any]) -> str:
    """How the size of automatic noise was chosen."""
    if choice["kind"] == "loss":
        change = f"the loss goes from {choice['before']:.4f} to {choice['after']:.4f}, {choice['found']:.0%} of the way to"
        end = f"an untrained model's {choice['untrained']:.4f}"
    else:
        change = f"the cosines between outputs change by {choice['after']:.3f} (root mean square), {choice['found']:.0%} of"
        end = f"an untrained model's {choice['untrained']:.3f}"
    return f"noise t={choice['t']:g}, by {choice['text']}: {change} {end}\n"


def _not_measured(error: MupscaleError) -> str:
    return (
        f"loss not measured: {error}\n  the smallest noise that is documented is {DEFAULT_NOISE}; to see "
        "what it costs, run this command again where base and result fit into memory: it measures a finished result"
    )


def _costs(found: Losses, request: Request) -> str:
    """What the noise costs, with a warning of a jump."""
    from ..training.grow.loss_rise import is_jump, jump_message, smaller

    scheme, size = (None, 0.0) if request.noise is None else request.noise
    if not is_jump(found.before, found.after):
        return str(found)
    remedy = f"write --noise {AUTO}, or {scheme}={smaller(size):g}" if size > 0 else "write less noise"
    if found.kind == "outputs":
        message = f"noise changes the cosines between outputs by {found.after:.3f}: what they mean is lost; {remedy}"
    else:
        message = jump_message(found.before, found.after, remedy)
    return f"{found}\nwarning: {message}"


def _rounding(shares: Mapping[str, float]) -> str:
    """How much of the noise is lost to rounding, by kind of tensor."""
    from ..checkpoints.lost_noise import ADVISE

    worst: dict[str, float] = {}
    for name, share in shares.items():
        worst[pattern_of(name)] = max(share, worst.get(pattern_of(name), 0.0))
    lossy = {name: share for name, share in worst.items() if share > ADVISE}
    head = (
        f"noise lost to rounding: at most {max(worst.values(), default=0.0):.1%} of the entries of a tensor"
    )
    if not lossy:
        return head
    rows = [(name, f"{share:.0%}") for name, share in sorted(lossy.items(), key=lambda item: -item[1])]
    advice = "above 10 %: write float32 masters (--dtype float32), or use more noise"
    return f"{head}\n{columns(rows, right=(1,))}\n  {advice}"
