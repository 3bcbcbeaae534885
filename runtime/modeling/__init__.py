"""Code shared by all model families: configuration, decoder and encoder."""
