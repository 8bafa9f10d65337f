"""``budgetfit doctor``: diagnose the installation, with commands that fix it.

``gather`` collects facts about this machine; the ``check_`` files turn them into
findings. Nothing here imports torch: libraries are imported in subprocesses, because a
broken one may crash. Open ``checks.py`` first.
"""
