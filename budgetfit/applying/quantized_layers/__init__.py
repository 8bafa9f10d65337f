"""bitsandbytes' NF4 and LLM.int8() linear layers on fake tensors.

In comes the shape of a linear layer; out comes a module that allocates in forward and
backward what the CUDA one does. Open ``nf4_linear.py`` first.
"""
