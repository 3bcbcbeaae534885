"""How the demo model is made: corpus, tokenizer, training and evaluation. The server never imports this package."""
