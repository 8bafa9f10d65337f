"""Time of a training step, from the arithmetic and traffic of its ops. No torch.

In come ops and a GPU; out come nanoseconds. Open ``roofline.py`` first.
"""
