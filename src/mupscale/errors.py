"""The only exception of this package, and the layout and style of its messages.

Turns several faults into one message. Knows nothing about models, tensors or files. The style, in six lines:

- a code names the refusal for programs and tests: "noise.too_large"; it stays when the words change;
- a claim says in one sentence what cannot be done: lower case first, no period last, no "please";
- `where` is a name the reader can search for: a tensor, a module, a file, an option without its "=";
- `what` says what was found and what was expected: "length 5, expected 6";
- `remedy` says what to write or do: "pass 6"; a lone fault may stand in the claim, as "found, expected; remedy";
- values are shown as Python shows them ('adam', 0.1), code to write stands bare (lr=0.1); no backticks.

The page docs/refusals.md lists every code with its words. It is generated; change a message here in the source.

>>> try:
...     raise_faults("the plan does not fit", [Fault("plan.length", "w", "length 5, expected 6", "pass 6")])
... except MupscaleError as error:
...     print(error.codes)
('plan.length',)
"""

from collections.abc import Iterable
from typing import NamedTuple


class Fault(NamedTuple):
    """One thing that is wrong: its code, where it is, what was found, and what to write instead.

    >>> print(Fault("plan.length", "w", "length 5, expected 6", "pass 6"))
      w [plan.length]
        length 5, expected 6
        pass 6
    """

    code: str
    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.where} [{self.code}]", f"    {self.what}"]
        if self.remedy:
            lines.append(f"    {self.remedy}")
        return "\n".join(lines)


class MupscaleError(Exception):
    """Raised once for everything that is wrong with a request; nothing was changed.

    An error has either faults, each with a code, or a claim that says everything and a code of its own.

    >>> print(MupscaleError("the plan does not fit", [Fault("plan.length", "w", "length 5, expected 6", "pass 6")]))
    the plan does not fit (1 fault)
    <BLANKLINE>
      w [plan.length]
        length 5, expected 6
        pass 6
    >>> print(MupscaleError("the file is empty", code="file.empty"))
    the file is empty [file.empty]
    """

    def __init__(self, claim: str, faults: Iterable[Fault] = (), *, code: str = "") -> None:
        self.claim = claim
        self.faults = tuple(faults)
        self.codes = tuple(fault.code for fault in self.faults) or (code,)
        super().__init__(self._message())

    @property
    def code(self) -> str:
        """The code of the claim, or of the first fault."""
        return self.codes[0]

    def _message(self) -> str:
        if not self.faults:
            return f"{self.claim} [{self.code}]" if self.code else self.claim
        count = len(self.faults)
        head = f"{self.claim} ({count} fault{'s' if count > 1 else ''})"
        return "\n\n".join([head, *map(str, self.faults)])

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.claim, self.faults, self.code)


def _again(kind: type[MupscaleError], claim: str, faults: tuple[Fault, ...], code: str) -> MupscaleError:
    return kind(claim, faults, code=code)


def raise_faults(claim: str, faults: Iterable[Fault]) -> None:
    """Raise one error that lists every fault, or return when there are none."""
    collected = tuple(faults)
    if collected:
        raise MupscaleError(claim, collected)
