"""A model from what users name: a hub id, a config, a folder, a factory, timm, Keras.

In comes text or an object; out comes an ``nn.Module`` on the meta device with what it
was made from. Open ``model_source.py`` first.
"""
