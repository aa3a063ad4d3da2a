"""The page of the study, docs/frontier.md: one question, table and answer per stage, from what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from textwrap import fill

from ..store import RESULTS, Store
from . import exactness, midrun, sunk, unseen
from .choose import Arm
from .sizes import HERE, Finished
from .spec import Spec
from .tables import Book, Seen, figures, sunk_contest
from .train import Trainer

_HEAD = """\
# When growing pays

This page is printed from stored runs (`reproduce/results/frontier.jsonl`) by `python docs/generate.py`. `python -m
reproduce.frontier` makes the runs that are missing, and `--stage print` prints every table.

You have a model, and FLOPs to spend. Is growing better than to train on, or to train a wider model from its start? All
runs below end with a rate of zero, because runs that people finish do, and they are compared by held-out loss at their end.

{short}

## How the runs are made

- An MLP with four layers on Forest Cover Type, batches of 512, AdamW, μP from width {reference}.
- Warm-up over 5 % of the FLOPs, constant, linear to zero over the last 30 %. The schedule is a function of the FLOPs that are
  spent, before and after growth.
- Rates, noise and the time of growth are chosen on seed {tuning}, by one half of the held-out rows. The tables show the other
  half, as the mean of seeds {seeds} with the distance between them in brackets. Rates are powers of two; the best one is
  inside of the grid, or one factor of two from the rate that was tuned at the middle budget.
- One unit is {unit:.3g} FLOPs, {steps:,} steps at width {reference}.
"""
_LIMITS = """\
## Limits

- One task, small models, two reported seeds. What holds here is a sign for larger models, not a law.
- Equal FLOPs are not equal data: a wider model reads fewer samples for the same FLOPs. The store has both.
- Growing tries more settings than the other arms, because it has one more: the noise.
- What others say against it. [2307.06440](https://arxiv.org/abs/2307.06440): gains of stacking layers vanish against a
  baseline whose rate is fully decayed. [2605.13405](https://arxiv.org/abs/2605.13405): preserving the function is not
  necessary, gains are most reliable at twice the size and below 20 tokens a parameter, and beyond a bound training from
  scratch wins. [2510.19093](https://arxiv.org/abs/2510.19093) and [2605.21486](https://arxiv.org/abs/2605.21486) hold that
  weight decay, or the rate of the embedding, explains more of the transfer between widths than μP does.
- At a constant rate gains are larger than here ([the paper's experiments](reproduction.md)).
"""


def book() -> Book:
    """What is stored in the repository."""

    def no_task(layers: int) -> None:
        raise AssertionError("printing trains nothing")

    trainer = Trainer(Store(RESULTS / "frontier.jsonl"), RESULTS, no_task)  # type: ignore[arg-type]
    return Book(trainer.known, HERE)


def page() -> str:
    """The whole page."""
    stored = book()
    sizes = stored.sizes
    head = _HEAD.format(
        short=fill(" ".join(["**In short.**", *_short(stored)]), 120),
        reference=sizes.reference,
        tuning=sizes.tuning_seed,
        seeds=" and ".join(map(str, sizes.seeds)),
        unit=sizes.unit,
        steps=10_000,
    )
    parts = [head, *_sunk(stored), _exactness(stored), _open(stored), _LIMITS]
    return "\n".join(part for part in parts if part)


def _short(stored: Book) -> Iterator[str]:
    """One sentence for every cited base and budget."""
    for base in stored.sizes.cited_bases:
        for extra in stored.sizes.cited_extras:
            found = sunk_contest(stored, base, extra)
            if found is None:
                continue
            gain, beyond = found
            spent = (
                "as many FLOPs again as it has cost"
                if extra == 1
                else f"{extra:g} times the FLOPs that it has cost"
            )
            told = (
                f"growing a finished base of width {base.width} ends {100 * (1 - 1 / gain):.0f} % below the best alternative"
                if beyond
                else f"growing a finished base of width {base.width} and its best alternative cannot be told apart"
            )
            yield f"With {spent}, {told}."


def _sunk(stored: Book) -> Iterator[str]:
    for base in stored.sizes.bases:
        rows = [
            [name, *(_cell(stored.sunk(base, name, extra)) for extra in stored.sizes.extras)]
            for name in sunk.names(base)
        ]
        kept = [i for i, _ in enumerate(stored.sizes.extras, 1) if all(row[i] for row in rows)]
        if not kept:
            continue
        told = [f"{stored.sizes.extras[i - 1]:g} × its budget" for i in kept]
        lines = [f"## A finished base of width {base.width}, paid for ({_units(base)})", ""]
        own = _own(stored, base)
        if own is not None:
            lines += [f"The base itself is at {own.mean:.4f} ({own.spread:.4f}).", ""]
        lines += [f"| | {' | '.join(told)} |", "|---" * (len(kept) + 1) + "|"]
        lines += [f"| {row[0]} | {' | '.join(row[i] for i in kept)} |" for row in rows]
        gains = [_gain(stored, base, stored.sizes.extras[i - 1]) for i in kept]
        lines += [f"| the best alternative over the best grown | {' | '.join(gains)} |", ""]
        lines += ["Beside each loss: the peak of the rate, and the noise t of growing.", ""]
        yield "\n".join(lines)


def _exactness(stored: Book) -> str:
    """What carried optimizer state is worth, once all of its runs are stored."""
    arms = {name: (stored.exactness(name), stored.exactness(name, "early")) for name in exactness.names()}
    if any(seen is None for pair in arms.values() for seen in pair):
        return ""
    sizes = stored.sizes
    rows = [f"| {name} | {_short_cell(end)} | {_short_cell(early)} |" for name, (end, early) in arms.items()]
    return f"""\
## What exact optimizer state is worth

A base of width {sizes.narrow} is grown to {2 * sizes.narrow} in mid-run, with the same wide weights in every row: the state is
carried in new units, carried as it is, or fresh.

| | held out, at the end | training, over the first 1 % |
|---|---|---|
{chr(10).join(rows)}

Noise is worth far more than the state. With noise, carried state over the best other row is {figures(stored)["c_end"]} at the
end and {figures(stored)["c_early"]} over the first 1 %: at this size a fresh optimizer does as well, and carrying the state buys
exactness, not a lower loss. State in wrong units is the worst of the rows with noise at the end.
"""


def _short_cell(seen: Seen | None) -> str:
    return "" if seen is None else f"{seen.mean:.4f} ({seen.spread:.4f})"


def _units(base: Finished) -> str:
    return f"{base.units} unit{'' if base.units == 1 else 's'}"


def _own(stored: Book, base: Finished) -> Seen | None:
    chosen = sunk.arm(stored.known, stored.sizes, base, "goes on", 1.0).chosen
    return None if chosen is None or chosen.start is None else stored.seen(Arm((), chosen.start))


def _gain(stored: Book, base: Finished, extra: float) -> str:
    found = sunk_contest(stored, base, extra)
    assert found is not None
    return f"{found[0]:.3f}{'' if found[1] else ', seeds overlap'}"


def _cell(seen: Seen | None) -> str:
    return "" if seen is None else f"{seen.mean:.4f} ({seen.spread:.4f}) {_told(seen.chosen)}"


def _told(spec: Spec) -> str:
    return f"2^{log2(spec.lr):g}" + (f", t = {spec.noise:g}" if spec.grows else "")


def _open(stored: Book) -> str:
    """The questions that no stored runs answer yet."""
    sizes = stored.sizes
    open_bases = [
        f"a base of width {base.width}, {_units(base)}, with {extra:g} × its budget"
        for base in sizes.bases
        for extra in sizes.extras
        if sunk_contest(stored, base, extra) is None
    ]
    questions = {
        "growth in mid-run at equal total FLOPs": all(
            stored.mid_run(name, units) is not None for units in sizes.mid_run for name in midrun.names(sizes)
        ),
        "what exact optimizer state is worth": all(
            stored.exactness(name) is not None for name in exactness.names()
        ),
        "the recipe without a sweep on settings that chose nothing": all(
            stored.unseen(name) is not None for name in unseen.NAMES
        ),
    }
    lines = [*open_bases, *(name for name, done in questions.items() if not done)]
    if not lines:
        return ""
    told = " ".join(f"{name}={value}" for name, value in figures(stored).items())
    listed = "\n".join(f"- {line}" for line in lines)
    return f"## Not answered yet\n\n{listed}\n\nThe last line of `--stage print`: `{told}`.\n"
