"""The trace of a deep model from those of a shallow one, proven before it is used.

In come traces of a model with four and five of its repeated blocks; out comes that of
the whole. Open ``extrapolate.py`` first.
"""
