"""The endpoints under /v1 that clients of OpenAI's API call."""
