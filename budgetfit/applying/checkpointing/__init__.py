"""Recompute, save selectively or offload the activations of blocks while training.

In come the blocks of a model and what a recipe says of each; their forwards are wrapped
until ``Undo`` puts them back. Open ``checkpoint.py`` first.
"""
