"""Calls of the engine: they turn bodies into requests and outputs into answers.

The HTTP APIs and the Python API both use these modules, which do not depend on HTTP.
"""
