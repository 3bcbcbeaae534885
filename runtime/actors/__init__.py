"""The actors (tokenizer, scheduler, detokenizer), which exchange messages through mailboxes, and the engine core."""
