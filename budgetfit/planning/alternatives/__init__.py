"""Alternatives: baselines, other objectives, changes of training, GPUs, refusals.

In comes a plan or its absence; out come rows and suggestions, each planned for itself.
Open ``alternatives.py`` first.
"""
