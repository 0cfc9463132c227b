"""The contracts: per op, what its arguments must be and what its results look like.

One contract feeds the fake kernel, the real allocation and the buffer planner, so the three cannot drift. Every
contract takes the op's arguments by keyword (defaults live in the schema alone), raises an error in words, and returns
one TensorSpec per result. The `*_specs` functions give the same specs from sizes, for the planner.
"""
