"""Code that all model families share: configuration, decoder, encoder and draft head."""
