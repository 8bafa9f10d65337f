"""Planning: trace, profile, search, judge, report.

In come a ``Workload``, a ``Budget`` and a ``Request``; out comes a ``Plan`` or a
``DoesNotFitError``. Open ``planner.py`` first: it is the pipeline, and all that it
searches with is in a ``PlanningSession`` (``session.py``).
"""
