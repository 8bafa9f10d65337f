"""CUDA semantics for a trace on fake CPU tensors: dispatch, outputs, kernel memory.

Input: aten ops on fake CPU tensors. Output: the outputs that CUDA would return, and the
scratch memory of its kernels. Start with ``op_semantics.py``.
"""
