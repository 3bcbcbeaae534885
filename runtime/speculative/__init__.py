"""Draft methods: they propose tokens, which the model verifies."""
