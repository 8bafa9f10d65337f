"""Find the repeated blocks of a model, and which of them do the same.

In comes a module; out come paths of blocks and runs of equal ones. Open
``find_blocks.py`` first.
"""
