"""Times of the whole layer: `python -m moe_ops.bench --help`."""
