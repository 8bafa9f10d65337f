"""Extrapolate the trace of a shortened model to the full number of layers, validated.

In come traces of a model with four and five of its repeated blocks; out comes that of
the full model. Start with ``extrapolate.py``.
"""
