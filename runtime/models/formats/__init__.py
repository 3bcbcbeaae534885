"""Forms in which checkpoints hold quantised weights, one file each: `FORMATS` in config/quantization.py.

A file holds

    derive(stored: Stored, fields: Fields) -> Derived

which looks at the stored tensors' names, dtypes and shapes and says which of the model's tensors are made of them.
Every layer then reads those as if the checkpoint were an ordinary one: cut over ranks, experts included, whatever
shape their parameters have.
"""
