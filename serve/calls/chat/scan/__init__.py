"""Scanner of outputs: generators read text, which arrives in pieces, once from left to right.

A reader is a generator that yields when it needs more text. It reads from a `Source` and writes to an `Output`. It
looks ahead by at most the length of the longest mark. Therefore its time is linear in the length of the text, and the
result does not depend on how the text is split.
"""
