"""Roofline times of a training step. No torch.

In come ops and a GPU; out come nanoseconds. Open ``roofline.py`` first.
"""
