"""Times of the kernels of a training step, and how far to trust them. No torch.

In come ops and a GPU; out come nanoseconds. Open ``kernel_times.py`` first.
"""
