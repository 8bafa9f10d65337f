"""Which ops run: CUDA's autocast, attention backend and composite ops.

Kernels registered at PyTorch's dispatcher for the length of a trace. Open
``composite_ops.py`` first.
"""
