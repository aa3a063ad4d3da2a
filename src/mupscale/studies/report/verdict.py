"""The verdict on studies that differ in their seed: is noise worth it, by how much against the spread, what to type next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from itertools import islice
from math import inf, isfinite, log
from pathlib import Path
from statistics import fmean

from ...errors import MupscaleError
from ..agenda.grid import Point
from ..command import read_command
from ..settings import Settings
from ..tune import stay_note
from .held_out import LEAST, Gains, chosen, gains, nearest
from .known import Known, Tried, know

_WORDS = ("no", "one", "two", "three")
_MORE = 2
"""Seeds whose commands are shown when nothing is decided: an example, since the user decides how many."""


@dataclass(frozen=True)
class Verdict:
    """A verdict as text: its one sentence, what it stands on, and the next step with its commands."""

    head: str
    facts: Sequence[str] = ()
    step: str = ""
    commands: Sequence[str] = ()

    def __str__(self) -> str:
        step = [f"next: {self.step}"] if self.step else []
        lines = [f"verdict: {self.head}", *(f"  {fact}" for fact in self.facts), *step]
        return "\n".join([*lines, *(f"  {command}" for command in self.commands)])


def beside(known: Known) -> list[Known]:
    """This study, and those of other seeds in folders that are named as the commands of a verdict name them."""
    found, first = [known], _folder(known)
    for path in (first, *sorted(first.parent.glob(f"{escape(first.name)}-seed*"))):
        if path.resolve() == known.folder.resolve() or not (path / "study.journal").is_file():
            continue
        with suppress(MupscaleError, OSError, ValueError):  # another study that is called so, or no study
            other = know(path, study=known.name)
            found += [other] if _apart_from_seed(other) == _apart_from_seed(known) else []
    return found


def verdicts(studies: Sequence[Known], stored_here: bool = True) -> list[Verdict]:
    """A verdict for all studies that differ in their seed only, in the order in which they are given.

    Commands to type next are known for studies that are stored in their folders.
    """
    groups: dict[Settings, list[Known]] = {}
    for known in studies:
        groups.setdefault(_apart_from_seed(known), []).append(known)
    found = [_Seeds(group, stored_here).verdict() for group in groups.values()]
    if len(found) == 1:
        return found
    names = [", ".join(str(known.folder) for known in group) for group in groups.values()]
    return [replace(one, head=f"{name}: {one.head}") for name, one in zip(names, found, strict=True)]


def _apart_from_seed(known: Known) -> Settings:
    return replace(known.settings, seed=0)


def _folder(known: Known, ending: str = "") -> Path:
    """The folder of this study without its seed, and with this ending instead."""
    own = known.folder if known.folder.name else known.folder.resolve()
    return own.with_name(re.sub(r"-seed\d+$", "", own.name) + ending)


class _Seeds:
    """Studies that differ in their seed only: what each seed that is done has found, and which are left out."""

    def __init__(self, group: Sequence[Known], stored_here: bool) -> None:
        done, self.left, self.bare = dict[int, Known](), list[str](), False
        self.units = group[0].settings.by_units
        for known in sorted(group, key=lambda known: known.settings.seed):
            seed = known.settings.seed
            compared = any(loss < inf for t, loss in _ended(known) if t.point.is_control)
            if known.done and compared and seed not in done:
                done[seed] = known
                continue
            why = f"seed {seed} is there already" if seed in done else known.status
            if known.done and not compared:
                why, self.bare = f"every run {self._without()} diverged", True
            self.left.append(f"{known.folder} is not counted: {why}.")
        self.group, self.done = group, list(done.values())
        self.noisy, self.plain = (
            [
                {t.point: loss for t, loss in _ended(known) if t.point.is_control is kind}
                for known in self.done
            ]
            for kind in (False, True)
        )
        first = self.done[0] if self.done and stored_here else None
        self.command = None if first is None else read_command(first.folder, first.name)

    def verdict(self) -> Verdict:
        status = self.group[0].status
        if not self.done and self.bare:
            return Verdict(
                f"None: every run {self._without()} diverged, so there is nothing to compare.", self.left
            )
        if not self.done:
            step = "Continue it with the command that began it." if self.group[0].unfinished else ""
            return Verdict(f"None yet: {status}.", (), step)
        if all(loss == inf for losses in self.noisy for loss in losses.values()):
            which = "grown run" if self.units else "run with noise"
            return Verdict(f"{self._who()} is not worth it here: every {which} diverged.", self.left)
        return self._decided() if len(self.done) >= LEAST else self._too_few()

    def _who(self) -> str:
        """What the sweep compares with the base that is trained on: copies and noise, or new units."""
        return "Growing" if self.units else "Noise"

    def _without(self) -> str:
        return "that does not grow" if self.units else "without noise"

    def _decided(self) -> Verdict:
        noise, point, first = gains(self.noisy, self.plain), chosen(self.noisy), self.done[0]
        stay = [{leg.point: r.loss for leg, r in known.stay.items() if r is not None} for known in self.done]
        who, at = self._who(), " at equal steps" if self.units else ""
        head = _sentence(
            f"{who} is worth it{at}",
            f"{who} is not worth it{at or ' here'}",
            "Not decided",
            who.lower(),
            noise,
        )
        chosen_by, choice = (
            ("rate", "") if self.units else ("noise and rate", f"noise {point.noise:.4g} and ")
        )
        facts = [
            f"{len(noise.each)} of {len(self.done)} seeds are judged, each at the {chosen_by} that the seeds before it "
            f"choose. All together choose {choice}rate {point.lr:.4g}."
        ]
        worth, growth = {noise.worth}, Gains(())
        if all(stay):
            growth, at = gains(self.noisy, stay), "at equal FLOPs"
            worth.add(growth.worth)
            yes, no = f"Growing is worth it {at}", f"Growing is not worth it {at}"
            sentence = _sentence(
                yes, no, f"Whether growing is worth it {at} is not decided", "growing", growth
            )
            head, facts = (
                (f"{head} {sentence}", facts) if growth.worth is False else (head, [*facts, sentence])
            )
        facts += [*(() if noise.worth else self._late()), *self.left]
        if worth == {True}:
            near = min(self.done, key=lambda known: _far(known, point))
            step = "Grow your base with the recipe that is nearest to this choice"
            if self.command is None:
                return Verdict(head, facts, f"{step}: {near.folder / 'recipe.json'}.")
            return Verdict(head, facts, f"{step}:", [self.command.applied(near.folder, near.settings.k)])
        if False in worth:
            after = str(2 * first.settings.after)
            apart = growth.worth and not self.units
            instead = "Grow without noise" if apart else "Train the base on without growing"
            step = f"{instead}, or see what twice the steps after growth give"
            if self.command is not None and "--data" in self.command.options:
                step += " (a text that is too short for them is refused)"
            place = {first.settings.seed: _folder(first, f"-steps{after}")}
            return Verdict(head, facts, *self._next(f"{step}:", place, {"--wide-steps": after}))
        step = "Decide now how many more seeds to run: looking after each one gives chance several tries. For two more:"
        return Verdict(head, facts, *self._more(_MORE, step))

    def _too_few(self) -> Verdict:
        count = LEAST - len(self.done)
        head = f"Not decided: {_WORDS[len(self.done)]} of the {_WORDS[LEAST]} seeds that tell a gain from chance."
        step = f"Run {_WORDS[count]} more seed{'s' if count > 1 else ''}:"
        return Verdict(head, [*self._found(), *self._late(), *self.left], *self._more(count, step))

    def _found(self) -> list[str]:
        """What every seed has found, which is no verdict."""
        facts = []
        for known, noisy, plain in zip(self.done, self.noisy, self.plain, strict=True):
            best, least = chosen([noisy]), min(plain.values())
            if noisy[best] == inf:
                which = "grown run" if self.units else "run with noise"
                facts.append(f"Seed {known.settings.seed}: every {which} diverged.")
                continue
            size = f"{abs(least - noisy[best]):.3g} {'lower' if noisy[best] < least else 'higher'}"
            count = len({point.noise for point in noisy})
            chance = f" It is the best of {count} noises, so part of it is chance." if count > 1 else ""
            grown, than = f"noise {best.noise:.4g} ends", "no noise"
            if self.units:
                grown, than = f"new units at rate {best.lr:.4g} end", "the base, trained on for as many steps"
            facts.append(
                f"Seed {known.settings.seed}: {grown} at {noisy[best]:.4g}, {size} than {than} ({least:.4g}).{chance}"
            )
            losses = {leg.how: r.loss for leg, r in known.stay.items() if r is not None}
            if losses:
                facts.append(f"Seed {known.settings.seed}: {stay_note(noisy[best], losses)}.")
        return facts

    def _late(self) -> list[str]:
        """A sentence where the first losses after growth are higher with noise than without."""
        if self.units:
            return []
        rises = []
        for known in self.done:
            curves = {t.point: t.curve[0][1] for t, _ in _ended(known) if t.curve}
            ends = [nearest(curves, chosen(side)) for side in (self.noisy, self.plain)]
            first = [curves[end] for end in ends if end is not None]
            rises += [first[0] - first[1]] if len(first) == 2 else []
        return ["Noise costs at first and may pay later."] if rises and fmean(rises) > 0 else []

    def _more(self, count: int, step: str) -> tuple[str, list[str]]:
        """The step and the commands of so many more seeds: first those that are begun, then new ones."""
        taken = {known.settings.seed for known in self.group}
        ended = {known.settings.seed for known in self.done}
        begun = [k for k in self.group if k.unfinished and k.settings.seed not in ended]
        places = {known.settings.seed: known.folder for known in begun}
        new = ((seed, _folder(self.done[0], f"-seed{seed}")) for seed in range(10**6) if seed not in taken)
        places |= dict(islice((pair for pair in new if not pair[1].exists()), count))
        seen = [known.folder for known in self.done]
        return self._next(step, dict(islice(places.items(), count)), {}, seen)

    def _next(
        self, step: str, places: Mapping[int, Path], changes: Mapping[str, str], seen: Sequence[Path] = ()
    ) -> tuple[str, list[str]]:
        """The step, and the commands that run these seeds with these changes and report them with what was seen."""
        if self.command is None:
            named = ", ".join(f"seed {seed} in {folder}" for seed, folder in places.items())
            with_ = "".join(f"{name} {value}, " for name, value in changes.items())
            return f"{step} {named}, {with_}otherwise with the same settings.", []
        lines = [
            self.command.line({**changes, "--seed": str(seed), "--folder": str(folder)})
            for seed, folder in places.items()
        ]
        if len(places) + len(seen) > 1:
            name = self.command.options.get("--study")
            words = ["mupscale", "report", *map(str, (*seen, *places.values()))]
            lines.append(shlex.join([*words, *([] if name is None else ["--study", name])]))
        return step, lines


def _ended(known: Known) -> list[tuple[Tried, float]]:
    """The points of sweep 2 that ran to their end or diverged, with their loss."""
    tried = known.wide.tried if known.wide is not None else ()
    return [(t, t.loss) for t in tried if t.loss is not None and t.state in ("finished", "diverged")]


def _sentence(yes: str, no: str, unknown: str, who: str, found: Gains) -> str:
    """A comparison in one sentence."""
    if not found.known:
        same = len(set(found.each)) == 1 and isfinite(found.each[0])
        why = "the seeds change nothing" if same else "runs diverged on some seeds"
        return f"{unknown}: {why}, so there is no spread to compare with."
    times = f"{abs(found.mean) / found.spread:.2g} times the spread over seeds ({found.spread:.2g})"
    size = f"{'lowers' if found.mean > 0 else 'raises'} the loss by {abs(found.mean):.3g}"
    what = {True: yes, False: no, None: unknown}[found.worth]
    bound = f"; more than {found.needed:.2g} times would decide" if found.worth is None else ""
    return f"{what}: {who} {size}, {times}{bound}."


def _far(known: Known, point: Point) -> tuple[float, float]:
    """How far the recipe of a study is from a point, first in noise; a recipe without noise is farthest."""
    best = known.wide.best if known.wide is not None else None
    if best is None or not best.noise or not point.noise:
        return inf, inf
    return abs(log(best.noise / point.noise)), abs(log(best.lr / point.lr))
