"""The table of the study, printed and as a section of docs/frontier.md, from what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from statistics import fmean
from textwrap import fill

from ...store import RESULTS, Store
from ..book import NOT_RUN, Seen, contest, seen
from ..choose import Arm, Known
from ..questions.directions import ARMS, DEEP, LARGER, MIXTURE, Sizes, arm, base
from ..settings.stock import MIXTRAL
from ..spec import Spec
from ..train import Result

FILE = "directions.jsonl"
OURS = ("ours", "copied_readers")
PENDING = ("stacked",)
"""Arms without which the page is printed while they have not been run."""
DIRECTIONS = ("depth", "width", "experts")


def results(known: Known, sizes: Sizes) -> dict[str, Seen | None]:
    """Every arm with its reported seeds; None while a run is missing."""
    return {name: seen(known, arm(known, sizes, name), sizes.seeds) for name in sizes.arms}


def gains(found: dict[str, Seen | None]) -> dict[str, tuple[float, bool] | None]:
    """For each direction: how many nats its growth by our plans ends below the best of going on and starting anew.

    With it: whether the seeds do not overlap. The tuning seed chooses on both sides.
    """
    told = {}
    for of in DIRECTIONS:
        names = [name for name, made in ARMS.items() if made.of == of and not _is_pending(name, found)]
        grown = [found[name] for name in names if ARMS[name].method in OURS and not ARMS[name].scratch]
        others = [found["goes on"], *(found[name] for name in names if ARMS[name].scratch)]
        told[of] = contest(grown, others, nats=True)
    return told


def against_peers(found: dict[str, Seen | None]) -> dict[str, tuple[float, bool] | None]:
    """For depth and experts: how many nats growth by our plans ends below the best published method."""
    told = {}
    for of in ("depth", "experts"):
        made = [name for name, made in ARMS.items() if made.of == of and not made.scratch]
        names = [name for name in made if not _is_pending(name, found)]
        sides = {
            ours: [found[n] for n in names if (ARMS[n].method in OURS) is ours] for ours in (True, False)
        }
        told[of] = contest(sides[True], sides[False], nats=True)
    return told


def _is_pending(name: str, found: dict[str, Seen | None]) -> bool:
    return name in PENDING and found[name] is None


def deep(known: Known, sizes: Sizes) -> dict[str, dict[int, tuple[float, float]]]:
    """For each way to double the layers, by seed: by how much the loss rises at growth, and where it ends.

    Only seeds that every way has; none before the rates are chosen.
    """
    chosen = {name: arm(known, sizes, name).chosen for name in DEEP}
    told: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in DEEP}
    for seed in (sizes.tuning_seed, *sizes.seeds):
        found = {name: known(spec.with_seed(seed)) for name, spec in chosen.items() if spec is not None}
        ended = {name: one for name, one in found.items() if one is not None and one["held"] is not None}
        for name, one in ended.items() if len(ended) == len(DEEP) else ():
            told[name][seed] = (_rise(one), float(one["held"]))
    return told


def _rise(result: Result) -> float:
    noise = result["noise"]
    return float(noise["after"]["choose"] - noise["before"]["choose"])


def over_stack(known: Known, sizes: Sizes) -> dict[int, float]:
    """What stack order with writers of zero ends above G_stack, by seed."""
    found = deep(known, sizes)
    return {seed: end - found["stack"][seed][1] for seed, (_, end) in found["stacked"].items()}


def figures(known: Known, sizes: Sizes, larger: Sizes) -> dict[str, str]:
    """The figures of the last line, in nats; below zero growing loses. `over_stack` is above zero where G_stack ends lower."""
    found = results(known, sizes)
    told = {name: None if gain is None else gain[0] for name, gain in gains(found).items()}
    told |= {
        f"{of}_over_peers": None if gain is None else gain[0] for of, gain in against_peers(found).items()
    }
    for each in (sizes, larger):
        apart = over_stack(known, each)
        whole = len(apart) == 1 + len(each.seeds)
        told[f"over_stack_{each.width}"] = fmean(apart.values()) if whole else None
    return {name: NOT_RUN if value is None else f"{value:+.4f}" for name, value in told.items()}


def show(known: Known, sizes: Sizes, larger: Sizes, say: Callable[[str], object] = print) -> int:
    """Print the tables and the line of figures; 1 if a run is missing."""
    missing = []
    for each in (sizes, larger):
        found = results(known, each)
        own = seen(known, Arm((), base(known, each).chosen), each.seeds)
        say(f"{f'the base, of width {each.width}':76} {_cell(own)}")
        for name, one in found.items():
            say(f"{': '.join(part for part in (ARMS[name].of, ARMS[name].label) if part):76} {_cell(one)}")
        missing += [f"{name}, from width {each.width}" for name, one in found.items() if one is None]
    for line in missing:
        say(f"missing: {line}")
    say(" ".join(f"{name}={value}" for name, value in figures(known, sizes, larger).items()))
    return 1 if missing else 0


def stored_section() -> str:
    """The sections from what is stored in the repository."""
    store = Store(RESULTS / FILE)

    def known(spec: Spec) -> Result | None:
        return store.known(spec.key)

    return "\n".join(
        part
        for part in (
            section(known, Sizes()),
            depth_section(known, Sizes(), LARGER),
            mixture_section(known, MIXTURE),
        )
        if part
    )


def depth_section(known: Known, sizes: Sizes, larger: Sizes) -> str:
    """Ways to double the layers beside each other, at the sizes and on the seeds that have them all; "" without any."""
    kept = [each for each in (sizes, larger) if over_stack(known, each)]
    if not kept:
        return ""
    widths = " | ".join(f"width {each.width}: rises by | ends at" for each in kept)
    rows = [f"| | {widths} |", "|---" * (2 * len(kept) + 1) + "|"]
    for name in DEEP:
        cells = (" | ".join(_rise_and_end(deep(known, each)[name])) for each in kept)
        rows += [f"| {ARMS[name].label} | {' | '.join(cells)} |"]
    about = (
        "Two layers become four, with as many FLOPs again. Columns show by how much the held-out loss rises at growth, and its "
        "end, each as the mean over the seeds below, with the distance between them in brackets where there are more than one. "
        "Stack order has a quarter of the base's peak, untuned."
    )
    if larger in kept:
        about += f" At width {larger.width} all three have it."
    told = fill(" ".join(_apart(known, each) for each in kept), 120)
    return "\n".join(["### The order of new layers", "", fill(about, 120), "", *rows, "", told, ""])


def mixture_section(known: Known, sizes: Sizes) -> str:
    """What a mixture may become, beside each other on every seed; "" while a run is missing."""
    seeds = (sizes.tuning_seed, *sizes.seeds)
    rows = []
    for name in sizes.arms:
        chosen = arm(known, sizes, name).chosen
        found = [None if chosen is None else known(chosen.with_seed(seed)) for seed in seeds]
        ended = [one for one in found if one is not None and one["held"] is not None]
        if chosen is None or len(ended) < len(seeds):
            return ""
        rise = f"{_rise(ended[0]):+.4f}" if chosen.grows else ""
        ends = " | ".join(f"{one['held']:.4f}" for one in ended)
        steps = f"{ended[0]['steps']:,}"
        rows.append(f"| {ARMS[name].label} | {rise} | {ends} | 2^{log2(chosen.lr):g} | {steps} |")
    about = (
        f"The base is a stock Mixtral of width {sizes.width} with {sizes.layers} layers and {MIXTRAL} experts, of which a token takes two, "
        f"trained with {sizes.budget:.3g} FLOPs until its rate is zero. Each row spends as many again, without a balance loss; seed "
        f"{sizes.tuning_seed} chose the better of two rates. Rises are those of the held-out loss at growth, on that seed. What is published "
        "begins with an empty optimizer; our ways carry its state."
    )
    names = " | ".join(f"ends at, seed {seed}" for seed in seeds)
    table = [f"| | rises by | {names} | rate | steps |", "|---" * (len(seeds) + 4) + "|", *rows]
    return "\n".join(["### More experts for a mixture", "", fill(about, 120), "", *table, ""])


def _apart(known: Known, sizes: Sizes) -> str:
    found = over_stack(known, sizes)
    seeds = ", ".join(f"{nats:+.4f} (seed {seed})" for seed, nats in found.items())
    lacking = [str(seed) for seed in (sizes.tuning_seed, *sizes.seeds) if seed not in found]
    rest = f" Not run yet: seed{'s' if lacking[1:] else ''} {' and '.join(lacking)}." if lacking else ""
    return f"Stack order minus G_stack at width {sizes.width}, in nats: {seeds}.{rest}"


def _rise_and_end(found: Mapping[int, tuple[float, float]]) -> tuple[str, str]:
    rises, ends = zip(*found.values(), strict=True)
    spread = f" ({max(ends) - min(ends):.4f})" if len(ends) > 1 else ""
    return f"{fmean(rises):.4f}", f"{fmean(ends):.4f}{spread}"


def section(known: Known, sizes: Sizes) -> str:
    """The section of the page; "" until every run is stored."""
    found = results(known, sizes)
    own = seen(known, Arm((), base(known, sizes).chosen), sizes.seeds)
    if own is None or any(one is None and not _is_pending(name, found) for name, one in found.items()):
        return ""
    trained = known(own.chosen)
    assert trained is not None
    rows = [f"| | {made.label} | {_cell(found[name])} |" for name, made in ARMS.items() if not made.of]
    for of in DIRECTIONS:
        rows += [
            f"| {of} | {made.label} | {_cell(found[name])} |"
            for name, made in ARMS.items()
            if made.of == of and not _is_pending(name, found)
        ]
    return f"""\
## Deeper, wider by zeros, or by experts: a Llama on text

`python -m reproduce.growth --study directions` makes these runs, and `--stage print` prints them. The base is a stock Llama of width
{sizes.width} with {sizes.layers} layers, trained on {trained.get("samples", 0):,} BPE tokens of textbooks until its rate is zero; it is at
{own.mean:.4f} ({own.spread:.4f}). Each row spends as many FLOPs again, {sizes.budget:.3g}. Schedule, choices and seeds are as above. What
[sleeps](growth.md) is woken before the first step. LLaMA Pro, G_stack and sparse upcycling train all weights here, with an
empty optimizer. No row has a balance loss.

| | | held out, at the end |
|---|---|---|
{chr(10).join(rows)}

{fill(_told(found), 120)}
"""


def _told(found: dict[str, Seen | None]) -> str:
    """What the table says, in sentences made of its figures."""
    told = []
    for of, gain in gains(found).items():
        assert gain is not None
        told.append(f"{_GROWN[of]} {_verdict(gain, 'the better of going on and starting anew')}.")
    for of, gain in against_peers(found).items():
        assert gain is not None
        told.append(
            f"With {of}, our plans end {_verdict(gain, 'the best other method').removeprefix('ends ')}."
        )
    told += [
        f"Without all of its seeds, {ARMS[n].label} is not counted." for n in PENDING if found[n] is None
    ]
    return " ".join(told)


_GROWN = {
    "depth": "Growing deeper",
    "width": "Growing wider",
    "experts": "Adding experts",
}


def _verdict(gain: tuple[float, bool], other: str) -> str:
    """A gain in nats in words.

    >>> _verdict((0.03, True), "going on"), _verdict((-0.01, False), "going on")
    ('ends 0.030 nats below going on', 'ends 0.010 nats above going on')
    """
    nats, beyond = gain
    overlap = ", with seeds that overlap" if nats > 0 and not beyond else ""
    return f"ends {abs(nats):.3f} nats {'below' if nats > 0 else 'above'} {other}{overlap}"


def _cell(one: Seen | None) -> str:
    if one is None:
        return NOT_RUN
    copies = one.chosen.start is not None and one.chosen.width == 2 * one.chosen.start.width
    noise = f", t = {one.chosen.noise:g}" if copies else ""
    return f"{one.mean:.4f} ({one.spread:.4f}) 2^{log2(one.chosen.lr):g}{noise}"
