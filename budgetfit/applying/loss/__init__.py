"""Call the model and take its loss, in one piece or in chunks of the logits.

In come a model, a batch and perhaps a loss function; out comes a scalar to
differentiate. Open ``call_model.py`` first.
"""
