"""Build a model from a hub id, config, folder, factory, timm or Keras model.

In comes text or an object; out comes an ``nn.Module`` on the meta device with its
source. Open ``model_source.py`` first.
"""
