"""The command line: one file per verb, named after it, and no arithmetic of its own.

`grow.py` holds `grow` and `upscale`. A file may share its name with the module that does the work (`cost`, `plan`,
`report`, `tune`): here the name is always the verb's. `options/VERB.py` holds the options of a verb and refuses those
that cannot work. It imports no torch until they are accepted, so help and refusals come at once.
"""
