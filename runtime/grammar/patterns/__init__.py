"""Regular expressions: parsing, comparison as automata, and conversion for a grammar library."""
