"""Ollama's API: the routes below /api."""
