"""C++ kernels for the CPU: compiled on first use, loaded with ctypes, run without the GIL.

`build` compiles and caches the library, `library` loads it, `structures` declares the operands of its kernels, and
`kernel_launcher` runs the kernels or captures them in a graph. The `with_cpp` files of the operations use them.
"""
