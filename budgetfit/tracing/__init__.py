"""Trace one training step on fake tensors with CUDA semantics.

In comes a program, out comes a ``StepTrace``: every storage's size and lifetime, every
op's cost. Start with ``recording/step_tracer.py``.
"""
