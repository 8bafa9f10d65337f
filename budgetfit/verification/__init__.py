"""``verify``: compare a plan's prediction with measured training steps.

In comes a ``Plan``; out comes a ``Verification``. Open ``verify_plan.py`` first.
"""
