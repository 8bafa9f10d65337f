"""Find the repeated blocks of a model, and runs of structurally equal ones.

In comes a module; out come paths of blocks and runs of equal blocks. Start with
``find_blocks.py``.
"""
