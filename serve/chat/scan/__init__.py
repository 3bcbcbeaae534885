"""The scanner of outputs: text that comes in pieces, read once from left to right by generators.

A reader is a generator that yields when it needs more text. It takes from a `Source` and writes to an `Output`; it
looks ahead no further than the longest mark it may have to recognise, so its time is linear in the text and where
the text is cut changes nothing.
"""
