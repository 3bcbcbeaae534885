"""Endpoints of the native API, which follow SGLang's, and of vLLM's and Vertex AI's APIs."""
