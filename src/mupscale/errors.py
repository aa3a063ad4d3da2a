"""The only exception of this package, and the layout and style of its messages.

Turns several faults into one message. Knows nothing about models, tensors or files. The style, in five lines:

- a claim says in one sentence what cannot be done: lower case first, no period last, no "please";
- `where` is a name the reader can search for: a tensor, a module, a file, an option without its "=";
- `what` says what was found and what was expected: "length 5, expected 6";
- `remedy` says what to write or do: "pass 6"; a lone fault may stand in the claim, as "found, expected; remedy";
- values are shown as Python shows them ('adam', 0.1), code to write stands bare (lr=0.1); no backticks.

>>> raise_faults("the plan does not fit", [Fault("w", "length 5, expected 6", "pass 6")])
Traceback (most recent call last):
    ...
mupscale.errors.MupscaleError: the plan does not fit (1 fault)
<BLANKLINE>
  w
    length 5, expected 6
    pass 6
"""

from collections.abc import Iterable
from typing import NamedTuple


class Fault(NamedTuple):
    """One thing that is wrong: where, what was found, and what to write instead.

    >>> print(Fault("w", "length 5, expected 6", "pass 6"))
    w
      length 5, expected 6
      pass 6
    """

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.where}", f"    {self.what}"]
        if self.remedy:
            lines.append(f"    {self.remedy}")
        return "\n".join(lines)


class MupscaleError(Exception):
    """Raised once for everything that is wrong with a request; nothing was changed.

    >>> print(MupscaleError("the plan does not fit", [Fault("w", "length 5, expected 6", "pass 6")]))
    the plan does not fit (1 fault)
    <BLANKLINE>
      w
        length 5, expected 6
        pass 6
    """

    def __init__(self, claim: str, faults: Iterable[Fault] = ()) -> None:
        self.claim = claim
        self.faults = tuple(faults)
        super().__init__(self._message())

    def _message(self) -> str:
        if not self.faults:
            return self.claim
        count = len(self.faults)
        head = f"{self.claim} ({count} fault{'s' if count > 1 else ''})"
        return "\n\n".join([head, *map(str, self.faults)])

    def __reduce__(self) -> tuple[type, tuple[str, tuple[Fault, ...]]]:
        return type(self), (self.claim, self.faults)


def raise_faults(claim: str, faults: Iterable[Fault]) -> None:
    """Raise one error that lists every fault, or return when there are none."""
    collected = tuple(faults)
    if collected:
        raise MupscaleError(claim, collected)
