"""PyTorch's allocator settings and its out-of-memory messages, as values.

In comes the text of ``PYTORCH_ALLOC_CONF`` or of an error, out go frozen dataclasses.
Open ``settings.py`` first.
"""
