"""Other languages that grammars are written in: EBNF and Lark."""
