"""C++ kernels for the CPU: compiled on first use, loaded with ctypes, run without the GIL.

`build` compiles and caches the library, `library` loads it, `structures` declares the operands of the kernels, and
`kernel_launcher` runs the kernels or captures them in a graph. The operations' `with_cpp` files call the launcher.
"""
