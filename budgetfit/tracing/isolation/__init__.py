"""Isolate a trace from global state: torch modes, RNGs, lazy imports, lru_caches.

Each file sets one of them for a trace and restores it. Start with ``torch_state.py``.
All that a plan changes in the process has a row in ``docs/reference/patches.md``.
"""
