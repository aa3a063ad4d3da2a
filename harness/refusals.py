"""Asserting that a call is refused: by the codes of its faults and the places that its message names, never by words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest

import mupscale as mu
from mupscale.errors import Fault

OTHER_WORDS = "other words"
"""What every refusal says while `reworded` lasts."""


def refusal(action: Callable[[], Any], *codes: str, where: str | Sequence[str] = ()) -> mu.MupscaleError:
    """The error that `action` raises; see `refused`."""
    with refused(*codes, where=where) as caught:
        action()
    return caught.value


class refused:  # noqa: N801 - used like pytest.raises
    """The block must raise a `MupscaleError` with every one of `codes`, whose message names every place in `where`.

    A place is a value that the caller knows, such as the name of a tensor, a file or an option. What the message says about
    it is not compared; the generated page of refusals shows it to people.
    """

    def __init__(self, *codes: str, where: str | Sequence[str] = ()) -> None:
        self._codes, self._where = codes, [where] if isinstance(where, str) else where
        self._raises = pytest.raises(mu.MupscaleError)

    def __enter__(self) -> pytest.ExceptionInfo[mu.MupscaleError]:
        self._caught = self._raises.__enter__()
        return self._caught

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._raises.__exit__(kind, value, trace):
            return False
        error = self._caught.value
        missing = [code for code in self._codes if code not in error.codes]
        assert not missing, f"no fault {', '.join(missing)} in {error.codes}: {error}"
        message = str(error)
        for place in self._where:
            assert place in message, f"{place!r} is not named in: {message}"
        for fault in error.faults:
            assert fault.where in message, f"the message does not name {fault.where}"
            assert fault.remedy in message, f"the message has no remedy for {fault.where}"
        return True


@contextmanager
def reworded() -> Iterator[None]:
    """Inside, every claim, every finding and every remedy of a refusal is the same two words; codes and places stay."""
    initialise = mu.MupscaleError.__init__

    def fault(cls: type[Fault], code: str, where: str, what: str, remedy: str = "") -> Fault:
        return tuple.__new__(cls, (code, where, OTHER_WORDS, remedy and OTHER_WORDS))

    def error(self: mu.MupscaleError, claim: str, faults: Sequence[Fault] = (), *, code: str = "") -> None:
        initialise(self, OTHER_WORDS, [Fault(*one) for one in faults], code=code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fault, "__new__", fault)
        patch.setattr(mu.MupscaleError, "__init__", error)
        yield
