"""How noise is asked for on a command line. Needs no torch, so that help and refusals come at once."""

from __future__ import annotations

from ..errors import MupscaleError
from ..rules.noise_defaults import DEFAULT_T, LARGEST_T, rise_for
from ..rules.schemes import SCHEMES

DEFAULT_NOISE = f"t={DEFAULT_T}"
"""What to write where no noise was tuned and the model cannot be loaded to choose it."""
AUTO = "auto"
"""Noise chosen by the loss that it costs."""
READERS = ("copied", "random")
"""What new units read when they wake: the names of `noise.kinds.Readers`, which need no torch here."""
WAKING = ("copied", 1.0)
"""What wakes new units where nothing else is asked for: `NewUnits()`."""


def parse_noise(text: str, steps: int | None = None) -> tuple[str, float]:
    """What `--noise` says; the share of automatic noise follows from the steps of training that `--train-steps` announces.

    >>> parse_noise("t=0.05"), parse_noise("auto"), parse_noise("auto", 1000)
    (('t', 0.05), ('auto', 0.05), ('auto', 0.25))
    >>> parse_noise("random"), parse_noise("copied=0.5")
    (('random', 1.0), ('copied', 0.5))
    """
    scheme, _, size = text.partition("=")
    if steps is not None and (text != AUTO or steps < 1):
        what = f"--train-steps {steps}: expected a whole number, 1 or more"
        raise MupscaleError(
            what if text == AUTO else f"--train-steps is for --noise auto, found --noise {text}",
            code="option.below_one" if text == AUTO else "option.steps_need_auto",
        )
    if text == AUTO:
        return AUTO, rise_for(steps)
    try:
        value = float(size or "1" if scheme in READERS else size)
    except ValueError:
        value = -1.0
    sized = scheme in (AUTO, *READERS)
    if not (sized or scheme in SCHEMES) or not 0 <= value < float("inf") or (sized and not value):
        sizes = ", ".join(f"{name}=…" for name in SCHEMES)
        raise MupscaleError(
            f"--noise {text}: expected auto, or {sizes} with a size of zero or more, such as {DEFAULT_NOISE}; or, with --by units, "
            f"{' or '.join(READERS)}",
            code="noise.not_a_size",
        )
    if scheme == "t" and value > LARGEST_T:
        raise MupscaleError(
            f"--noise {text}: noise above {LARGEST_T:g} times the norm of a weight leaves nothing of the weight; expected t "
            f"up to {LARGEST_T:g}, such as {DEFAULT_NOISE}",
            code="noise.above_norm",
        )
    return scheme, value
