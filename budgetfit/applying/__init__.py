"""Train a real model by a recipe: checkpointing, precision, optimizer, the step.

In come a model and a ``Recipe``, out comes a ``Run`` whose ``step`` trains; planning
runs the same code on fake tensors. Open ``run/run.py`` first.
"""
