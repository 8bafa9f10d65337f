"""Search for the best recipe that fits: solver, batch size, baselines.

In comes a ``PlanningSession``; out comes its best judged recipe. Open ``search.py``
first.
"""
