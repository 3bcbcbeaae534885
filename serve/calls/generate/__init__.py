"""The native call: prompts in, texts and token ids out."""
