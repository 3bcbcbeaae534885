"""The making of the demo model: corpus, tokenizer, training and evaluation. The server never imports this package."""
