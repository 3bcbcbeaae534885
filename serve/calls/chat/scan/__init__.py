"""Scanner of outputs: readers consume text that arrives in pieces, once from left to right.

Marks are the delimiter texts of a format, for example <tool_call>. A reader is a generator that reads from a `Source`,
writes to an `Output`, and yields when it needs more text. It looks ahead by at most the length of the longest mark.
Therefore its time is linear in the length of the text, and its result
does not depend on how the text is split.
"""
