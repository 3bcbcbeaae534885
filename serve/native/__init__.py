"""The engine's own endpoints."""
