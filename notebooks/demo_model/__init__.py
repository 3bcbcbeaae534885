"""How the demo model is made: corpus, tokenizer, training, evaluation. Never imported by the server."""
