"""Op semantics of CUDA: outputs and scratch memory of an op call.

Start with ``context.py``.
"""
