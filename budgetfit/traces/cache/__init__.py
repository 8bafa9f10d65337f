"""The trace cache on disk, keyed by a hash of everything that a trace depends on.

In come model, batch, code, settings and versions; out comes the trace, or nothing.
Start with ``cache.py`` and ``key.py``.
"""
