"""The first half hour on a GPU, prepared: what to carry there, what to run in which order, and the report.

`gpu-bundle` gathers what the GPU's machine lacks, `gpu-contact` runs every stage under a budget of time.
"""
