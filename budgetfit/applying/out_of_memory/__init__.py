"""Out of memory in a training step: explain the error, propose a smaller recipe.

In come an out-of-memory error and the run's recipe; out come an explained error and a
recipe that needs less. Open ``error.py`` first.
"""
