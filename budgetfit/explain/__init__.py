"""``budgetfit explain``: what an out-of-memory message means, and what to change.

In comes text, out come plain values. Needs neither torch nor a GPU, because the message
is often read on another machine than the one that wrote it. Open ``explain.py`` first.
"""
