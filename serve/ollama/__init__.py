"""The routes under /api as Ollama's clients call them."""
