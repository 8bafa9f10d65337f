"""The search: which batch size, which solver, which candidates are judged.

In come profiles, a budget and a request; out comes the fastest recipe that fits. Open
``search.py`` first.
"""
