"""`/v1/responses`: bodies, items, answers, and the bounded memory of earlier ones."""
