"""What CUDA would do where a trace on fake CPU tensors does not.

In come aten ops on fake CPU tensors; out come CUDA's results, and the memory that its
kernels allocate beside them. Open ``semantics/context.py`` first.
"""
