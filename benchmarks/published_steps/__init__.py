"""Steps whose times were published, their kernels, and the fit of the time model.

``steps.json`` holds the rows with their sources, ``kernels.json.gz`` what each asks of
a GPU (written by ``record.py``). Open ``predict.py`` first.
"""
