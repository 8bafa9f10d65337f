"""Calibration: measurements of ``verify`` on this machine, kept for later plans.

In come measured steps; out come the CUDA context size and the step times of this GPU,
for the next plan. Open ``known_measurements.py`` first.
"""
