"""Scanner of outputs: generators read text that arrives in pieces, once, from left to right.

A reader is a generator that yields when it needs more text. It reads from a `Source` and writes to an
`Output`. It looks ahead at most as far as the longest mark, so its time is linear in the text, and the result
does not depend on how the text is split.
"""
