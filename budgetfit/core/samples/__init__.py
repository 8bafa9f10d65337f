"""What samples are: the dimensions that count them, their lengths and image sizes.

In come a batch's shapes or what a user says of the data, out go frozen dataclasses.
Open ``sample_dims.py`` first.
"""
