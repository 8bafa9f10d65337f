"""``budgetfit explain``: explain an out-of-memory message, with advice.

In comes text, out come plain values. Needs neither torch nor a GPU, because the message
is often read on another machine. Open ``explain.py`` first.
"""
