"""Other libraries: model sources, LoRA adapters, quantization, exports.

One file per library. Open ``model_sources/model_source.py`` for loading models,
``exports/trainer.py`` for exporting plans.
"""
