"""What ``verify`` has measured on this machine, kept for later plans.

In come measured steps; out come the memory outside PyTorch's allocator and times of
this GPU, for the next plan. Open ``known_measurements.py`` first.
"""
