"""Run the model and compute its loss, whole or chunked over the logits.

In come a model, a batch and perhaps a loss function; out comes a scalar for
``backward``. Open ``call_model.py`` first.
"""
