"""Simulate the memory of a training step with PyTorch's CUDA caching allocator.

Input: a ``StepTrace``, a batch size and a GPU. Output: a ``MemoryTimeline``, to the
byte. Start with ``replay.py``.
"""
