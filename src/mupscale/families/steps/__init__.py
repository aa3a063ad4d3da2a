"""The steps in which a stock model grows: experts, words and positions, blocks, then width.

Imports config, types and copy. A further direction is one more file with a `Step`, and one line in `compose.py`.
"""
