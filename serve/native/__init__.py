"""Endpoints of the native API."""
