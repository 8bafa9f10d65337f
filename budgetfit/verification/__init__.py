"""``verify``: a plan's prediction against real steps.

In comes a ``Plan``; out comes a ``Verification``. Open ``verify_plan.py`` first.
"""
