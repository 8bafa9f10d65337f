"""Fake tensors and models: copies without memory, shortened copies, cached results.

In comes a real model; out comes one of fake tensors. Open ``model_copy.py`` first.
"""
