"""Chats and completions in OpenAI's form, which the Python API speaks too."""
