"""``Run``: training steps with gradient accumulation, checks and a state dict.

In come a model and a recipe; out come steps that train as a plain loop would. Open
``run.py`` first.
"""
