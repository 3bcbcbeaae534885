"""Studies and comparisons for developers, not in the wheel: `just study --help`, `just bench-cpu`.

Users measure with `penstock bench` (`serve/bench`). This package uses its workloads, client and report.
"""

PROGRAM = "just study"  # the program's name in usage texts and result files
