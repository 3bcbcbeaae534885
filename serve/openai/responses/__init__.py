"""`/v1/responses`: bodies, items, answers, and the bounded store of earlier responses."""
