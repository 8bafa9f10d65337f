"""Batches of nested tensors: count their samples and resize them.

In come nested dicts, lists and tensors; out come counts, and batches of another size.
Open ``sample_count.py`` first.
"""
