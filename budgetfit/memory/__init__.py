"""Bytes of a training step: PyTorch's caching allocator and the replay of a trace.

In come a ``StepTrace``, a batch size and a GPU; out comes a ``MemoryTimeline``, to the
byte. Open ``replay.py`` first.
"""
