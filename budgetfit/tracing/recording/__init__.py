"""Run one step on fake tensors and write down its storages and ops.

In comes a program; out comes a ``StepTrace``. Open ``step_tracer.py`` first.
"""
