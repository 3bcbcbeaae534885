"""Where keys and values live: pages, the tree of kept prefixes, and the pool on the device."""
