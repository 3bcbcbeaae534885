"""The coroutines that share mailboxes: tokenizer, scheduler, detokenizer, and the engine that holds them."""
