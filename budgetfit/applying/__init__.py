"""Train a model by a recipe: checkpointing, precision, optimizer, training step.

In come a model and a ``Recipe``, out comes a ``Run`` with a ``step`` that trains;
planning runs the same code on fake tensors. Open ``run/run.py`` first.
"""
