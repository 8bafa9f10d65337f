"""CUDA's op dispatch on CPU tensors: autocast, SDPA backend, composite ops.

Kernels are registered at PyTorch's dispatcher during a trace. Start with
``composite_ops.py``.
"""
