"""The traces of one planning session: made on demand, from shortened models, cached.

In come a recipe and a batch size; out comes a ``StepTrace``. Start with ``session.py``.
"""
