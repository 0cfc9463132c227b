"""moe_ops inside other libraries. One module a library; importing it plugs moe_ops in."""
