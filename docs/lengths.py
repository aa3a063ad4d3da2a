"""How long pages may be, in lines: stated here, and held by a test.

A page answers one question. One that grows past its length is cut or divided; raising a number here is the exception, with
its reason.
"""

PAGE = 170
"""Lines of a page that is not named below: about three screens of text beside its code."""
LENGTHS = {
    "README.md": 150,  # the first screen and what it leads to
    "api.md": 330,  # one line per public name
    "checkpoints.md": 240,  # every option of four commands
    "continue.md": 220,  # three trainers, one after the other
    "engines.md": 270,  # six engines, one after the other
    "frontier.md": 230,  # printed from stored runs
    "index.md": 200,  # the tutorial, and the tables that the README has no room for
    "layout.md": 400,  # printed from the files: one line per module
    "limits_of_width.md": 190,  # the calculus with its derivations
    "optimizers.md": 230,  # printed from the registry: one line per optimizer
    "refusals.md": 1300,  # printed from the source: one line per code
    "reproduction.md": 460,  # printed from stored runs: a section per setting
    "tuning.md": 360,  # a study from its first command to its recipe
}


def too_long(name: str, text: str) -> str:
    """What is wrong with the length of a page, or nothing.

    >>> too_long("README.md", "line\\n" * 151)
    'README.md has 151 lines, at most 150 are stated in docs/lengths.py'
    >>> too_long("README.md", "line\\n" * 150)
    ''
    """
    most, lines = LENGTHS.get(name, PAGE), len(text.splitlines())
    return f"{name} has {lines} lines, at most {most} are stated in docs/lengths.py" if lines > most else ""
