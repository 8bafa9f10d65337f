"""The judge: a recipe's trace is replayed, and that decides whether it fits.

In comes a recipe at a batch size; out comes an ``Estimate``. Open ``judge.py`` first.
"""
