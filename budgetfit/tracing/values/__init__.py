"""Values that decide the course of a forward, followed beside the fake tensors.

In come ops on fakes; out come the few real numbers that Python code asks for. Open
``known_values.py`` first.
"""
