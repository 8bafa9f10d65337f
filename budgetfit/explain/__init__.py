"""What an out-of-memory message means: where the bytes were, and what to change.

Text in, plain values out. Needs neither torch nor a GPU, because the message is often
read on another machine than the one that wrote it.
"""
