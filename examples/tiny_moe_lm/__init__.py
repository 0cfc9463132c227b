"""A byte-level mixture-of-experts language model, trained on the Python standard library."""
