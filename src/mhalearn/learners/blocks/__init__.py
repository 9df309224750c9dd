"""How a whole block is found: a student with surplus, pruned, then Gauss-Newton."""
