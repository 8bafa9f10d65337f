"""Profile the chain of blocks for the solvers: bytes and times of each option.

Input: traces. Output: a ``ChainProfile``, and the peak memory of a recipe on it. Start
with ``profile.py``.
"""
