"""bitsandbytes quantization of a model, with weights or for tracing.

In comes a model; out comes one with quantized linear layers, and a note on what stays
in 16 bits. Open ``traceable_layers.py`` first.
"""
