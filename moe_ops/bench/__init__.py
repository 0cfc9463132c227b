"""Times of the whole layer, and of other libraries' layers beside it: `python -m moe_ops.bench --help`."""
