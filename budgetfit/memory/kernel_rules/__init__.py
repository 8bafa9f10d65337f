"""Sizes of what CUDA kernels allocate for themselves, by rule, GPU and shape.

In come a rule's name and arguments from a trace; out come byte counts. Open
``workspaces.py`` first.
"""
