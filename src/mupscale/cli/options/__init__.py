"""The options of every verb, one file per verb; they refuse what cannot work before torch is imported.

`grow.py` holds those of `upscale` too. `verb.py` is what they share: the form of a help text, and the parser.
"""
