"""The report of a plan as one HTML file with figures, and as notebooks show it.

Open ``report.py`` first; each figure has a file in ``figures/``. Needs matplotlib and
Jinja2 (``pip install 'budgetfit[report]'``), imported when a report is asked for.
"""
