"""Data-dependent control flow under FakeTensor: constant propagation on small tensors.

Input: ops on fake tensors. Output: the few concrete values that Python code reads.
Start with ``known_values.py``.
"""
