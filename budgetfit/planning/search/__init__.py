"""Search for the best recipe that fits: solver, batch size, baselines.

In come profiles, a budget and a request; out comes the best judged recipe. Open
``search.py`` first.
"""
