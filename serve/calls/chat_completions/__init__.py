"""Chats and completions in OpenAI's format, for the HTTP API and the Python API."""
