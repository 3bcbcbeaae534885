"""The native call `/generate`: prompts in, texts and token ids out."""
