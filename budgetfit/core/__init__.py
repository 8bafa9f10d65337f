"""Value types: recipe, plan, budget, trace, precision; frozen dataclasses, no torch.

Fields carry their units and sources. Open ``recipe.py`` and ``plan.py`` first.
"""
