"""Make an example batch for a model from its config or layers.

In comes a model; out comes a batch of fake or real tensors that its forward takes, with
labels. Open ``make_batch.py`` first.
"""
