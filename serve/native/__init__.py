"""Endpoints of the native API, which is SGLang's, and of parts of vLLM's and Vertex AI's APIs."""
