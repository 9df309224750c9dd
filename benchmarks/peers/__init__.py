"""What other solvers need on the same examples: the peers, tuned, and the race against them."""
