"""Traces on disk, under a key made of everything that they depend on.

In comes a program (model, batch, code, versions); out comes its trace, or nothing. Open
``cache.py`` and ``key.py`` first.
"""
