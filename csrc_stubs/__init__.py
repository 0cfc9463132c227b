"""Stands in for compiled code: the C++ face of the ops (schemas.h), and libraries that need a card. See README.md."""
