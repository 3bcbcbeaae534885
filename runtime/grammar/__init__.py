"""What an output must match: JSON schemas, regular expressions and grammars."""
