"""Images, videos and audio in requests: reading, decoding, processing, encoding and caching them."""
