"""The part of a page that compares growing with staying at the base's width, at equal FLOPs."""

from __future__ import annotations

from math import inf

from ..agenda.status import GOES_ON
from .html import table, tag
from .known import Known


def loss_text(loss: float | None) -> str:
    """A loss in a table; infinite when the run diverged.

    >>> loss_text(0.123456789), loss_text(None), loss_text(inf)
    ('0.123457', '–', 'diverged')
    """
    return "–" if loss is None else "diverged" if loss == inf else f"{loss:.6g}"


def growing(known: Known) -> str:
    """Whether growing beat not growing, at equal FLOPs."""
    head = tag("h3", "Growing, or staying at the base's width")
    settings = known.settings
    if settings.flops is None or not settings.stay:
        why = (
            "was left out"
            if not settings.stay
            else "needs the FLOPs of a step: define inputs() in the proxy's file"
        )
        return head + tag("p", f"The run at the base's width for as many FLOPs {why}.")
    leader = known.wide.leader if known.wide is not None and known.wide.best is not None else None
    if leader is None or leader.loss is None:
        return head + tag("p", "The base's width is trained for as many FLOPs when the sweeps are done.")
    narrow, wide = settings.flops
    base = settings.steps * narrow
    rows = [
        (
            "grown",
            f"{settings.steps:,} + {settings.after:,}",
            f"{base + settings.after * wide:.4g}",
            loss_text(leader.loss),
        )
    ]
    for leg, done in known.stay.items():
        steps = f"{settings.steps:,} + {leg.end:,}" if leg.how == GOES_ON else f"{leg.end:,}"
        flops = narrow * leg.end + (base if leg.how == GOES_ON else 0)
        loss = loss_text(None if done is None else done.loss)
        rows.append((f"not grown, {leg.how}", steps, f"{flops:.4g}", loss))
    return head + table(("", "steps", "FLOPs", "loss"), rows, numbers=(1, 2, 3))
