"""Stores of KV pages outside the process: the protocol, a folder of files, and the pages of prefill servers."""
