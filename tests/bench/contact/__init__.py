"""The first half hour on a GPU machine: the files to bring, the stages to run, and the report.

`gpu-bundle` collects the files that the machine lacks. `gpu-contact` runs every stage within a time budget.
"""
