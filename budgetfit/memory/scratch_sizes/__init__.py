"""Rules for the scratch memory that CUDA kernels allocate, by GPU and shape.

Input: a rule's name and arguments from a trace. Output: byte counts. Start with
``workspaces.py``.
"""
