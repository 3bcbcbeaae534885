"""Draft methods: they propose draft tokens, which the model verifies."""
