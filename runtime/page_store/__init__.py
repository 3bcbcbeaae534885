"""Stores of KV pages outside the process: the protocol, and a folder of files."""
