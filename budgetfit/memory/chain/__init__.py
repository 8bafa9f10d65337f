"""The chain of blocks as the solver sees it: bytes and times of each option.

In come traces; out come ``ChainProfile`` and the formula of a recipe's peak. Open
``profile.py`` first.
"""
