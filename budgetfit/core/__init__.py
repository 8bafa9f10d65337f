"""The values that everything passes on: recipe, plan, budget, trace, precision.

Frozen dataclasses with their units and sources, without torch. Open ``recipe.py`` and
``plan.py`` first.
"""
