"""``budgetfit doctor``: can this installation train, and if not, what to do.

In comes this machine (``gather`` finds the facts), out come findings (the ``check_``
files). Nothing here imports torch: libraries are tried in processes of their own,
because the ones that matter are the ones that break. Open ``checks.py`` first.
"""
