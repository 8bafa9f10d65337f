"""Run one training step on fake tensors and record its storages and ops.

In comes a program; out comes a ``StepTrace``. Start with ``step_tracer.py``.
"""
