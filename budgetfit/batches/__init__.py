"""Batches: made for a model from its config, counted and cut into samples.

In comes a model or a user's own batch; out come a batch of any size, the number of its
samples, and which dimensions grow with it. Open ``make_batch.py`` first.
"""
