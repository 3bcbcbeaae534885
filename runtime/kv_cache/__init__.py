"""The KV cache: pages, the prefix tree, the caches of other layer kinds, and the memory pools on the device."""
