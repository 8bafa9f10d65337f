"""Carry out a recipe: checkpointing, precision, optimizer and the training step."""
