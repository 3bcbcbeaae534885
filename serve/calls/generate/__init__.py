"""The native call `/generate`, which takes prompts and returns texts and token ids."""
