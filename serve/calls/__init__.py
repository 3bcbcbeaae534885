"""Convert the bodies of API calls to engine requests, and engine outputs to answers.

The HTTP APIs and the Python API both use these modules. None of them depends on HTTP.
"""
