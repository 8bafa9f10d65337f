"""Batches as users hand them in: their tensors, and how many samples they hold.

In come nested dicts, lists and tensors; out come counts, and batches of another size.
Open ``sample_count.py`` first.
"""
