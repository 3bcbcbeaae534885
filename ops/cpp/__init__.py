"""Kernels in C++ for the CPU: compiled on first use, loaded with ctypes, run without Python's lock.

`build` makes the library and keeps it, `library` describes its kernels' operands, `kernel_launcher` runs them or
captures them in a graph. The operations' `with_cpp` files stand on these.
"""
