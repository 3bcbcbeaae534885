"""OpenAI's `/v1/responses`: bodies, items, answers, and a store of earlier responses with limited memory."""
