"""Reference implementation of the CUDA caching allocator, with expandable segments.

Written for clarity; tests compare the faster ``memory.caching_allocator`` with it.
Start with ``allocator.py``.
"""
