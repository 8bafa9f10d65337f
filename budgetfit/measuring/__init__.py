"""Measure real training steps: memory by phase, time, gradients.

In come a model, a recipe and a batch; out come measured phases, compared with what was
predicted. Open ``real_step.py`` first.
"""
