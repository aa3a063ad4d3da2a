"""What must be true of an output before anybody sees it: nobody can write into it any more, and all of it was read back.

Imports bytes and journal next to it.
"""
