"""HTML in small pieces: all content is escaped. Knows nothing about studies.

The page is self-contained: no scripts, fonts or external addresses; a content security policy forbids them.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

# Pictures have dark ink on white. In the dark their lightness is turned round and their hues stay.
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6068; --back: #ffffff; --card: #f4f5f7; --line: #d8dbe0;
  --mark: #0072b2; --warn: #8a4b00; --warn-back: #fff3e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e7e9; --soft: #a3a8b0; --back: #16181c; --card: #20242a;
  --line: #3a3f47; --mark: #56b4e9; --warn: #ffcf8a; --warn-back: #38290f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1.5rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem;
  border-top: 1px solid var(--line); padding-top: 1.2rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p, figcaption { color: var(--soft); margin: .3rem 0 .6rem; } figure { margin: 0; min-width: 0; }
img { display: block; margin: 0 auto; max-width: 100%; height: auto; background: white; border-radius: 6px; border: 1px solid var(--line); }
@media (prefers-color-scheme: dark) { img { filter: invert(.91) hue-rotate(180deg); } }
@media (max-width: 700px) { figure { overflow-x: auto; } img { max-width: none; max-height: 420px; } }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.2rem; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); border-radius: 6px; width: fit-content;
  max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .25rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  min-width: 4.5rem; max-width: 32rem; overflow-wrap: break-word; }
th { background: var(--card); position: sticky; top: 0; } td.number, th.number { text-align: right; white-space: nowrap; }
tr.chosen td { font-weight: 600; }
ul.notes { background: var(--warn-back); color: var(--warn); border-radius: 6px; padding: .6rem 1rem .6rem 2rem; margin: .6rem 0; }
pre { background: var(--card); border-radius: 6px; padding: .8rem; overflow: auto; max-height: 26rem; font-size: 12.5px;
  margin: .4rem 0; overflow-wrap: normal; }
.card { background: var(--card); border-left: 4px solid var(--mark); border-radius: 6px; padding: .7rem 1rem; margin: .6rem 0 1rem; }
.card p.head { color: var(--ink); font-size: 1.1rem; font-weight: 600; } .card pre { background: var(--back); white-space: pre-wrap; }
details { margin: .6rem 0; } summary { cursor: pointer; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page from parts that are HTML already."""
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(parts) + "\n</body>\n</html>\n"


def tag(name: str, text: str) -> str:
    """Text in an element.

    >>> tag("p", "a < b")
    '<p>a &lt; b</p>'
    """
    return f"<{name}>{escape(text)}</{name}>"


def picture(png: bytes, alt: str, caption: str) -> str:
    """An image within the page; `alt` describes it for screen readers."""
    data = b64encode(png).decode()
    return (
        f'<figure><img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}">'
        f"{tag('figcaption', caption)}</figure>"
    )


def pair(parts: Iterable[str]) -> str:
    """Side by side where there is room."""
    return '<div class="pair">' + "\n".join(parts) + "</div>"


def notes(lines: Sequence[str]) -> str:
    """A list that should be seen; nothing when it is empty."""
    return '<ul class="notes">' + "".join(tag("li", line) for line in lines) + "</ul>" if lines else ""


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), chosen: int | None = None
) -> str:
    """A table that scrolls where it is too long or too wide; columns in `numbers` to the right.

    >>> table(["a"], [["<b>"]]).count("<td>&lt;b&gt;</td>")
    1
    """

    def row(cells: Sequence[str], kind: str) -> str:
        made = (
            f'<{kind} class="number">{escape(cell)}</{kind}>' if i in numbers else tag(kind, cell)
            for i, cell in enumerate(cells)
        )
        return "".join(made)

    top = f"<thead><tr>{row(head, 'th')}</tr></thead>" if any(head) else ""
    marks = [' class="chosen"' if i == chosen else "" for i in range(len(rows))]
    body = "".join(f"<tr{mark}>{row(cells, 'td')}</tr>" for mark, cells in zip(marks, rows, strict=True))
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def card(head: str, parts: Iterable[str]) -> str:
    """What should be read first: a sentence, and parts that are HTML already."""
    return f'<section class="card"><p class="head">{escape(head)}</p>' + "".join(parts) + "</section>"


def folded(summary: str, part: str) -> str:
    """A part that opens on a click."""
    return f"<details>{tag('summary', summary)}{part}</details>"
