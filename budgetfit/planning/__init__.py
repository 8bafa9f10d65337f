"""The way to a plan: trace, profile, search, judge, report.

In come a ``Subject``, a ``Budget`` and a ``Request``; out comes a ``Plan`` or a
``DoesNotFitError``. Open ``planner.py`` first: it is the pipeline.
"""
