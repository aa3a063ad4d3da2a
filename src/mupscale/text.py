"""Plain text for a terminal: columns, sizes, durations."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: int = 2) -> str:
    """Rows with their columns aligned; those in `right` to the right.

    >>> print(columns([("a", "10"), ("bcd", "9")], right=[1], indent=0))
    a    10
    bcd   9
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        sized = enumerate(zip(row, widths, strict=True))
        cells = (cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in sized)
        return " " * indent + "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def size(count: float) -> str:
    """Bytes in readable units, in powers of ten.

    >>> size(999), size(1.5e9), size(5.6e11)
    ('999 B', '1.5 GB', '560 GB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 1000 or unit == "TB":
            break
    return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in readable units.

    >>> duration(0.3), duration(75), duration(7300)
    ('under 1 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 1:
        return "under 1 s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {seconds % 60:.0f} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """Seconds as a progress bar shows them.

    >>> clock(7), clock(75.2), clock(7300)
    ('00:07', '01:15', '2:01:40')
    """
    whole = round(seconds)
    minutes = f"{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes
