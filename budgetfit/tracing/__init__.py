"""One training step on fake tensors that behaves like CUDA, written down as numbers.

In comes a program, out comes a ``StepTrace``: every storage's size and life, every op's
cost. Open ``recording/step_tracer.py`` first.
"""
