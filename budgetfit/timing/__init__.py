"""Times of a training step's kernels. No torch.

In come ops and a GPU; out come nanoseconds, and how far to trust them. Open
``kernel_times.py`` first.
"""
