"""Reports as text or JSON. Nothing here computes a number.

Open ``render.py`` first, and ``plan_text.py`` for the report of a plan.
"""
