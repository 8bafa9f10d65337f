"""The caching allocator written for clarity, with expandable segments.

Its requests and answers are those of ``memory.caching_allocator``, which is faster and
which tests compare with it. Open ``allocator.py`` first.
"""
