"""Regular expressions: parsed once, compared as automata, and written for a grammar library."""
