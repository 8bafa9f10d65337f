"""Activation checkpointing, selective checkpointing and offload of blocks.

In come the blocks of a model and a recipe's segments; their forwards are wrapped until
``Undo`` restores them. Open ``apply_segments.py`` first.
"""
