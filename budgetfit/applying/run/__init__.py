"""``Run``: optimizer steps with gradient accumulation, resumable and guarded.

In come a model and a recipe; out come steps that train as a plain loop would. Open
``run.py`` first.
"""
