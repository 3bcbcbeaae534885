"""Grammar languages of clients: EBNF and Lark."""
