"""The bodies of ``budgetfit.plan``, ``estimate``, ``apply``, ``verify`` and of compare.

In come Python objects as users pass them; out goes a ``Plan``, an ``Estimate``, a
``Run`` or a ``Verification``. The work is done in ``planning``, ``applying`` and
``verification``. Open ``plan.py`` first.
"""
