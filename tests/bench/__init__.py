"""Studies and comparisons for developers, not in the wheel: `just study --help`, `just bench-cpu`.

What a user measures with is `penstock bench`, in `serve/bench`; this package uses its workloads, client and report.
"""

PROGRAM = "just study"  # as usage texts and result files name it
