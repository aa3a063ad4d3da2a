"""The page of the study, docs/frontier.md: one question, table and answer per stage, from what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

from ..book import (
    Book,
    Seen,
    mid_run_contest,
    new_units_contest,
    new_units_mid_run_contest,
    regret,
    ruled_contest,
    sunk_contest,
)
from ..choose import Arm
from ..questions import exactness, new_units, sunk
from ..sizes import Finished
from ..studies import STUDIES
from . import new_units as new_units_tables
from .directions import stored_section
from .sections import cell, gain_cell, mid_run, new_units_section, noise, state, without_a_sweep
from .tables import figures

_HEAD = """\
# When growing pays

This page is printed from stored runs (`reproduce/results/frontier*.jsonl`) by `python docs/generate.py`. `python -m
reproduce.growth` makes the runs that are missing, and `--stage print` prints every table.

You have a model, and FLOPs to spend. Is growing better than to train on, or to train a wider model from its start? All
runs below end with a rate of zero, because runs that people finish do, and they are compared by held-out loss at their end.

![held-out loss by what a finished model may still spend: train on, grow, or a new model](figures/frontier.svg)

*Every run is decayed to zero; bars span two seeds (`python docs/drawings.py`).*

{short}

## How the runs are made

- An MLP with four layers on Forest Cover Type, batches of 512, AdamW, μP from width {reference}.
- Warm-up over 5 % of the FLOPs, constant, linear to zero over the last 30 %. The schedule is a function of the FLOPs that are
  spent, before and after growth.
- Rates, noise and the time of growth are chosen on seed {tuning}, by one half of the held-out rows. The tables show the other
  half, as the mean of seeds {seeds} with the distance between them in brackets. Rates are powers of two; the best one is
  inside of the grid, or one factor of two from the rate that was tuned at the middle budget.
- One unit is {unit:.3g} FLOPs, {steps:,} steps at width {reference}.
- Three more studies are smaller: a stock Llama with two layers on BPE tokens of textbooks (OpenStax, AdamW), a stock GPT-2 with
  two layers on the same tokens, and a ResNet-18 on CIFAR-10 (SGD with momentum). The schedule and the rules of choosing are
  the same.
"""
_LIMITS = """\
## Limits

- Small models, mostly one task, two reported seeds. What holds here is a sign for larger models, not a law.
- Equal FLOPs are not equal data: a wider model reads fewer samples for the same FLOPs. The store has both.
- Growing by copies tries more settings than the other arms, because it has one more: the noise.
- What others say against it. [2307.06440](https://arxiv.org/abs/2307.06440): gains of stacking layers vanish against a
  baseline whose rate is fully decayed. [2605.13405](https://arxiv.org/abs/2605.13405): preserving the function is not
  necessary, gains are most reliable at twice the size and below 20 tokens a parameter, and beyond a bound training from
  scratch wins. [2510.19093](https://arxiv.org/abs/2510.19093) and [2605.21486](https://arxiv.org/abs/2605.21486) hold that
  weight decay, or the rate of the embedding, explains more of the transfer between widths than μP does.
- The directions are compared on one base alone, a small one that has seen many tokens for its size.
- At a constant rate gains are larger than here ([the paper's experiments](reproduction.md)).
"""


def books() -> list[Book]:
    """What is stored in the repository, of every study."""
    return [Book.of(study, study.trainer()) for study in STUDIES.values()]


def page() -> str:
    """The whole page."""
    stored = books()
    mlp = stored[0]
    sizes = mlp.sizes
    head = _HEAD.format(
        short=fill(" ".join(["**In short.**", *_short(stored)]), 120),
        reference=sizes.reference,
        tuning=sizes.tuning_seed,
        seeds=" and ".join(map(str, sizes.seeds)),
        unit=sizes.unit,
        steps=10_000,
    )
    told = [part for book in stored[1:] for part in (*_sunk(book), mid_run(book))]
    parts = [
        head,
        *_sunk(mlp),
        mid_run(mlp),
        *told,
        stored_section(),
        new_units_section(stored),
        noise(mlp),
        state(mlp),
        without_a_sweep(stored),
    ]
    return "\n".join(part for part in [*parts, _open(stored), _LIMITS] if part)


def differences() -> list[str]:
    """What docs/frontier.md says otherwise than the store: nothing, or what to do."""
    path = Path(__file__).parents[3] / "docs" / "frontier.md"
    same = path.is_file() and path.read_text(encoding="utf-8") == page()
    return [] if same else [f"{path.name} is not what is stored: run python docs/generate.py"]


def _short(books: list[Book]) -> Iterator[str]:
    """One sentence for every cited budget and way to grow, with all cited bases of the first study."""
    stored, readers = books[0], new_units_tables.chosen(books)
    how = "new units with random readers" if readers == "new units" else f"new units with {readers}"
    sizes = stored.sizes
    for extra in sizes.cited_extras:
        spent = "as many FLOPs again" if extra == 1 else f"{extra:g} times the FLOPs again"
        copies = {base: sunk_contest(stored, base, extra) for base in sizes.cited_bases}
        if told := _verdict(copies):
            yield f"With {spent} that a finished base has cost, growing it by copies {told}."
        if readers is not None:
            new = {base: new_units_contest(stored, base, readers, extra) for base in sizes.cited_bases}
            if told := _verdict(new):
                yield f"Growing it by {how} {told}."
    for units in sizes.cited_mid_run:
        found = mid_run_contest(stored, units)
        if found is not None and found[0] < 1:
            yield (
                f"Where the base is not paid for yet, {units} units for everything, growing {sizes.narrow} to {sizes.wide} on the way "
                f"by copies ends {100 * (1 / found[0] - 1):.0f} % above the best width throughout."
            )
        grown = None if readers is None else new_units_mid_run_contest(stored, readers, units)
        if grown is not None:
            side = "below" if grown[0] > 1 else "above"
            yield (
                f"Growing {sizes.narrow} to {new_units.TIMES * sizes.narrow} by {how} ends {100 * abs(1 - 1 / grown[0]):.1f} % {side} it"
                f"{'' if grown[1] or grown[0] < 1 else ', with seeds that overlap'}."
            )


def _verdict(found: Mapping[Finished, tuple[float, bool] | None]) -> str:
    """How growing ends on every base whose runs are stored; "" without any."""
    ahead, level, behind = [], [], []
    for base, contest in found.items():
        if contest is None:
            continue
        gain, beyond = contest
        name = f"{base.width} ({_units(base)})"
        if beyond:
            ahead.append(f"{100 * (1 - 1 / gain):.0f} % below the best alternative for width {name}")
        elif gain > 1:
            level.append(f"{name} by {100 * (1 - 1 / gain):.1f} %")
        else:
            behind.append(name)
    parts = [f"ends {_listed(ahead)}"] if ahead else []
    if level:
        parts.append(f"ends below the best alternative with seeds that overlap for width {_listed(level)}")
    if behind:
        parts.append(f"does not end below the best alternative for width {_listed(behind)}")
    return ", and ".join(parts)


def _listed(names: list[str]) -> str:
    """Names as a sentence lists them: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _sunk(stored: Book) -> Iterator[str]:
    for base in stored.sizes.bases:
        rows = [
            [name, *(cell(stored.sunk(base, name, extra)) for extra in stored.sizes.extras)]
            for name in sunk.names(stored.sizes, base)
        ]
        kept = [i for i, _ in enumerate(stored.sizes.extras, 1) if all(row[i] for row in rows)]
        if not kept:
            continue
        told = [f"{stored.sizes.extras[i - 1]:g} × its budget" for i in kept]
        of = {"mlp": "", "text": ", a Llama on text"}[stored.name]
        lines = [f"## A finished base of width {base.width}{of}, paid for ({_units(base)})", ""]
        own = _own(stored, base)
        if own is not None:
            lines += [f"The base itself is at {own.mean:.4f} ({own.spread:.4f}).", ""]
        lines += [f"| | {' | '.join(told)} |", "|---" * (len(kept) + 1) + "|"]
        lines += [f"| {row[0]} | {' | '.join(row[i] for i in kept)} |" for row in rows]
        gains = [_gain(stored, base, stored.sizes.extras[i - 1]) for i in kept]
        against = "the best alternative minus" if stored.nats else "the best alternative over"
        lines += [f"| {against} the best grown | {' | '.join(gains)} |"]
        extras = [stored.sizes.extras[i - 1] for i in kept]
        by_rule = [ruled_contest(stored, base, extra) for extra in extras]
        if any(by_rule):
            for name in sunk.ruled(stored.sizes, base):
                lines += [
                    f"| {name} | {' | '.join(cell(stored.sunk(base, name, extra)) for extra in extras)} |"
                ]
            told = [gain_cell(found, stored.nats) for found in by_rule]
            lines += [f"| {against} the best grown by rule | {' | '.join(told)} |"]
        for row in new_units_tables.base_rows(stored, base, extras, cell, gain_cell):
            lines += [f"| {' | '.join(row)} |"]
        lines += ["", "Beside each loss: the peak of the rate, and the noise t of growing by copies.", ""]
        yield "\n".join(lines)


def _units(base: Finished) -> str:
    return f"{base.units} unit{'' if base.units == 1 else 's'}"


def _own(stored: Book, base: Finished) -> Seen | None:
    chosen = sunk.arm(stored.known, stored.sizes, base, "goes on", 1.0).chosen
    return None if chosen is None or chosen.start is None else stored.seen(Arm((), chosen.start))


def _gain(stored: Book, base: Finished, extra: float) -> str:
    found = sunk_contest(stored, base, extra)
    assert found is not None
    return gain_cell(found, stored.nats)


def _open(stored: list[Book]) -> str:
    """The questions that no stored runs answer yet."""
    lines = [
        f"{line} ({book.name})" if book.name != "mlp" else line for book in stored for line in _lacking(book)
    ]
    if not lines:
        return ""
    told = " ".join(f"{name}={value}" for name, value in figures(stored).items())
    listed = "\n".join(f"- {line}" for line in lines)
    return f"## Not answered yet\n\n{listed}\n\nThe last line of `--stage print`: `{told}`.\n"


def _lacking(book: Book) -> Iterator[str]:
    sizes = book.sizes
    for base in sizes.bases:
        for extra in sizes.extras:
            if sunk_contest(book, base, extra) is None:
                yield f"a base of width {base.width}, {_units(base)}, with {extra:g} × its budget"
    mid_run = [mid_run_contest(book, units) for units in sizes.mid_run]
    if "a" in sizes.stages and None in mid_run:
        yield "growth in mid-run at equal total FLOPs"
    if "c" in sizes.stages and any(book.exactness(name) is None for name in exactness.names(sizes)):
        yield "every other way to begin the optimizer's state"
    for base in sizes.cited_bases if "u" in sizes.stages else ():
        for extra in sizes.cited_extras:
            lacking = [n for n in new_units.names(sizes, base) if book.new_units(base, n, extra) is None]
            if lacking:
                what = f"a base of width {base.width}, {_units(base)}, with {extra:g} × its budget"
                yield f"{_listed(lacking)} on {what}"
    for units in sizes.cited_mid_run if "u" in sizes.stages else ():
        if any(book.new_units_mid_run(name, units) is None for name in new_units.mid_run_names(sizes)):
            yield f"new units in mid-run, {units} units for everything"
    if regret(book) is None:
        yield "the recipe without a sweep on a setting that chose nothing"
