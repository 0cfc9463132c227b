"""The kernels that run on cards. Triton: one file per verb, with the op's name, imported by its first call.

A kernel is `kernel(outputs, **arguments)` with the arguments of its reference. It writes owned rows only, never waits
for the host, and gives the same bits on every run: no atomics, and slots, sums and ties in a fixed order.
"""
