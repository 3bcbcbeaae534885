"""Images in requests: reading, decoding, processing, encoding and caching them."""
