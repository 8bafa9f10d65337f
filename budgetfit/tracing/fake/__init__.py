"""Fake copies of models, shortened copies, cached results of ops on fake tensors.

In comes a real model; out comes one of fake tensors. Start with ``model_copy.py``.
"""
