"""The cost of growing compared with training from scratch and with not growing, and when it does not pay.

Knows the FLOPs of whole runs and findings of the literature; the FLOPs of one step come from `flops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from ..arguments import wrong_whole
from ..errors import Fault, raise_faults

Number = int | float | Fraction

ACCOUNTS = ("base sunk", "base charged", "tuning charged", "both charged")
"""What is charged: the upscaled run alone, plus the base's training, plus the tuning, plus both."""


@dataclass(frozen=True)
class Cost:
    """FLOPs of the four runs, and the four accounts of what growing costs in all.

    Args:
        scratch: FLOPs of the wide run from scratch.
        base: FLOPs of the base.
        tuning: FLOPs of tuning noise and learning rate.
        upscaled: FLOPs of the run from the upscaled start until it is as good as the run from scratch.

    Raises:
        MupscaleError: If one of them is negative or not finite.

    >>> cost = Cost(scratch=100, base=25, tuning=20, upscaled=40)
    >>> cost.both_charged, round(cost.speedup("base charged"), 2)
    (85, 1.54)
    """

    scratch: Number
    base: Number
    tuning: Number
    upscaled: Number

    def __post_init__(self) -> None:
        faults = [
            Fault(
                "cost.not_flops",
                name,
                f"{value} FLOPs, expected a finite number, 0 or more",
                "give the FLOPs of that run",
            )
            for name, value in vars(self).items()
            if not (isfinite(value) and value >= 0)
        ]
        if not faults and not self.scratch:
            what = "0 FLOPs, so there is nothing to compare with"
            faults.append(
                Fault(
                    "cost.nothing_to_compare_with", "scratch", what, "give the FLOPs of the run from scratch"
                )
            )
        raise_faults("these are not costs of runs", faults)

    @property
    def base_sunk(self) -> Number:
        """The upscaled run alone: the base was there anyway, and tuning is not counted."""
        return self.upscaled

    @property
    def base_charged(self) -> Number:
        """The base was trained only to be grown."""
        return self.base + self.upscaled

    @property
    def tuning_charged(self) -> Number:
        """The base was there anyway, and noise and learning rate had to be tuned."""
        return self.tuning + self.upscaled

    @property
    def both_charged(self) -> Number:
        """Everything that was computed."""
        return self.base + self.tuning + self.upscaled

    def charges(self, account: str) -> Number:
        """What an account pays before the upscaled run starts.

        Args:
            account: "base sunk", "base charged", "tuning charged" or "both charged".
        """
        return self.total(account) - self.upscaled

    def total(self, account: str) -> Number:
        """What an account pays in all.

        Args:
            account: The account, as for `charges`.
        """
        totals = (self.base_sunk, self.base_charged, self.tuning_charged, self.both_charged)
        return totals[ACCOUNTS.index(account)]

    def speedup(self, account: str) -> float:
        """How many times cheaper growing is than training from scratch; below 1 it is more expensive.

        Args:
            account: The account, as for `charges`.
        """
        total = self.total(account)
        return float(self.scratch / total) if total else float("inf")

    def break_even(self, account: str) -> float | None:
        """How many times faster than from scratch the upscaled run must be; None where no speed is enough.

        Args:
            account: The account, as for `charges`.

        >>> Cost(100, 25, 20, 40).break_even("base charged"), Cost(100, 25, 80, 40).break_even("both charged")
        (1.3333333333333333, None)
        """
        left = self.scratch - self.charges(account)
        return float(self.scratch / left) if left > 0 else None


@dataclass(frozen=True)
class ComparedRuns:
    """Widths and lengths of the runs that are compared.

    `width` -> k·`width` is grown, `proxy` -> k·`proxy` is tuned; `trials` counts full runs of the grown proxy, each
    as long as the run from scratch. `upscaled_steps` None: not known yet.
    """

    width: int
    k: int
    proxy: int
    steps: Number
    base_steps: Number
    trials: Number
    upscaled_steps: Number | None = None

    def __post_init__(self) -> None:
        faults = [
            fault
            for name, least in (("width", 1), ("k", 2), ("proxy", 1))
            for fault in wrong_whole(name, getattr(self, name), least=least)
        ]
        faults += [
            Fault("cost.not_steps", name, f"{value}, expected a number above 0", "give the steps of that run")
            for name in ("steps", "base_steps", "upscaled_steps")
            if (value := getattr(self, name)) is not None and not (isfinite(value) and value > 0)
        ]
        if not (isfinite(self.trials) and self.trials >= 0):
            what = f"{self.trials}, expected a number, 0 or more"
            faults.append(Fault("cost.not_trials", "trials", what, "write 25 for a grid of 5 x 5"))
        if self.proxy > self.width:
            faults.append(
                Fault(
                    "cost.proxy_wider_than_base",
                    "proxy",
                    f"{self.proxy}, wider than the base's {self.width}",
                    f"a proxy is tuned to save work: write {self.width} or less",
                )
            )
        raise_faults("these runs cannot be compared", faults)

    @property
    def wide(self) -> int:
        return self.k * self.width

    def tuning(self, flops_at: Callable[[int], Number], proxy: int) -> Number:
        """FLOPs of tuning with a proxy of some width."""
        return self.trials * self.steps * flops_at(self.k * proxy)

    def cost(self, flops_at: Callable[[int], Number]) -> Cost:
        """The cost, from the FLOPs of one step at any width.

        An upscaled run of unknown length counts as long as the run from scratch.

        >>> case = ComparedRuns(width=500, k=4, proxy=50, steps=1000, base_steps=1000, trials=25, upscaled_steps=250)
        >>> round(case.cost(lambda width: width**2).speedup("both charged"), 2)
        1.78
        """
        wide = flops_at(self.wide)
        return Cost(
            scratch=self.steps * wide,
            base=self.base_steps * flops_at(self.width),
            tuning=self.tuning(flops_at, self.proxy),
            upscaled=(self.steps if self.upscaled_steps is None else self.upscaled_steps) * wide,
        )

    def steps_throughout(self, flops_at: Callable[[int], Number]) -> float:
        """Steps that the base's width can take for the FLOPs of the run from scratch: what not growing at all gets.

        >>> case = ComparedRuns(width=500, k=4, proxy=50, steps=1000, base_steps=1000, trials=25)
        >>> case.steps_throughout(lambda width: width**2)
        16000.0
        """
        return float(self.steps * flops_at(self.wide) / flops_at(self.width))

    def largest_proxy(self, flops_at: Callable[[int], Number], account: str) -> int | None:
        """The largest n0 with which growing pays on an account, or None if not even a proxy of one unit pays.

        While the length of the upscaled run is unknown it counts as zero, so the result is an upper bound.

        >>> case = ComparedRuns(width=500, k=4, proxy=100, steps=1000, base_steps=1000, trials=25, upscaled_steps=250)
        >>> case.largest_proxy(lambda width: width**2, "tuning charged")
        86
        """
        cost = self.cost(flops_at)
        left = cost.scratch - (0 if self.upscaled_steps is None else cost.upscaled)
        left -= cost.base if account in ("base charged", "both charged") else 0
        tuned = account in ("tuning charged", "both charged")
        low, high = 0, self.width
        while low < high:
            middle = (low + high + 1) // 2
            if (self.tuning(flops_at, middle) if tuned else 0) < left:
                low = middle
            else:
                high = middle - 1
        return low or None


@dataclass(frozen=True)
class Objection:
    """A reason not to grow, or not like this, and where it comes from."""

    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} [{self.source}]"


LARGEST_K = 4
TOKENS_PER_PARAMETER = 20
SMALLEST_PROXY = 100
PAPER = "the paper (arXiv 2602.10545)"
WARMSTARTING = "Mallik et al. 2026 (arXiv 2605.13405)"
STACKING = "Du et al. 2024 (arXiv 2405.15319)"


def reasons(case: ComparedRuns, cost: Cost, tokens_per_parameter: float | None = None) -> list[Objection]:
    """Reasons against growing, from the literature and from the numbers.

    >>> case = ComparedRuns(width=500, k=8, proxy=100, steps=1000, base_steps=1000, trials=1, upscaled_steps=250)
    >>> [reason.source for reason in reasons(case, case.cost(lambda width: width**2))]
    ['the paper (arXiv 2602.10545), Mallik et al. 2026 (arXiv 2605.13405), Du et al. 2024 (arXiv 2405.15319)']
    """
    found = []
    if case.k > LARGEST_K:
        found.append(
            Objection(
                f"k = {case.k}: the paper grows by 2 and by 4, stacking does best at 4, and beyond a bound "
                "training from scratch was cheaper, with 2 the most reliable; grow less, or in stages",
                f"{PAPER}, {WARMSTARTING}, {STACKING}",
            )
        )
    if tokens_per_parameter is not None and tokens_per_parameter > TOKENS_PER_PARAMETER:
        found.append(
            Objection(
                f"{tokens_per_parameter:,.0f} tokens per parameter: gains were most pronounced below "
                f"{TOKENS_PER_PARAMETER} and shrank with the budget; expect little from growing",
                WARMSTARTING,
            )
        )
    if case.proxy < SMALLEST_PROXY and case.trials:
        found.append(
            Objection(
                f"n0 = {case.proxy}: hyperparameters carry over from about {SMALLEST_PROXY} units on; "
                "a cheaper proxy may find the wrong ones",
                PAPER,
            )
        )
    return found + _by_numbers(case, cost)


def _by_numbers(case: ComparedRuns, cost: Cost) -> list[Objection]:
    source = "the numbers above"
    for account, what in (
        ("tuning charged", "tuning alone costs"),
        ("base charged", "the base alone costs"),
        ("both charged", "base and tuning cost"),
    ):
        if cost.break_even(account) is None:
            share = float(cost.charges(account) / cost.scratch)
            text = f"{what} {share:.2f} times the run from scratch: with it charged, no speed of the upscaled run pays"
            return [Objection(text, source)]
    if case.upscaled_steps is not None:
        lost = [account for account in ACCOUNTS if cost.speedup(account) <= 1]
        if lost:
            return [
                Objection(
                    f"does not pay with {', with '.join(lost)}: training from scratch is cheaper", source
                )
            ]
    return []
