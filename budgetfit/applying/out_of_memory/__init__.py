"""What a run does when the GPU is full: say why, and go on with less.

In come an out-of-memory error and the run's recipe; out come an explained error and a
recipe that needs less. Open ``error.py`` first.
"""
