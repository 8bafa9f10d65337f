"""bitsandbytes' quantised layers in a model, real or for a trace.

In comes a model; out comes one whose linear layers are quantised, and a note of what
stays in 16 bits. Open ``bitsandbytes.py`` first.
"""
