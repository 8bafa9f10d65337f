"""The traces of one planning session: made when asked for, shortened, kept on disk.

In come a recipe and a batch size; out comes a ``StepTrace``. Open ``session.py``
first.
"""
