"""Asserting that a call is refused: by the codes of its faults and the places that its message names, never by words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import mupscale as mu


def refusal(action: Callable[[], Any], *codes: str, where: str | Sequence[str] = ()) -> mu.MupscaleError:
    """The error that `action` raises; see `refused`."""
    with refused(*codes, where=where) as caught:
        action()
    return caught.value


@contextmanager
def refused(*codes: str, where: str | Sequence[str] = ()) -> Iterator[pytest.ExceptionInfo[mu.MupscaleError]]:
    """The block must raise a `MupscaleError` with every one of `codes`, whose message names every place in `where`.

    A place is a value that the caller knows, such as the name of a tensor, a file or an option. What the message says about
    it is not compared; the generated page of refusals shows it to people.
    """
    with pytest.raises(mu.MupscaleError) as caught:
        yield caught
    error = caught.value
    missing = [code for code in codes if code not in error.codes]
    assert not missing, f"no fault {', '.join(missing)} in {error.codes}: {error}"
    message = str(error)
    for place in [where] if isinstance(where, str) else where:
        assert place in message, f"{place!r} is not named in: {message}"
    for fault in error.faults:
        assert fault.where in message, f"the message does not name {fault.where}"
        assert fault.remedy in message, f"the message has no remedy for {fault.where}"
