"""What must not leak into a trace, or out of it.

Torch's modes, Python's state, lazy imports, names of devices, random numbers: each file
sets one of them and puts it back. Open ``torch_state.py`` first.
"""
