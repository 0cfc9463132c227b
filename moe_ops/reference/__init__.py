"""Plain torch, float32 arithmetic, no cleverness: the CPU kernels, and what every other kernel is compared with.

A kernel is `kernel(outputs, **arguments)`: it writes the outputs' owned rows in place and leaves the others alone.
`moe.py` is apart: the whole layer as a float64 double loop, which shares no code with the ops.
"""
