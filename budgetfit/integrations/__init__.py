"""Other libraries: where models come from, adapters, quantisation, exports.

One file for each library or program. Open ``model_sources/model_source.py`` for what
comes in, ``exports/trainer.py`` for what goes out.
"""
