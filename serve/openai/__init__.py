"""Endpoints of OpenAI's API, under /v1."""
