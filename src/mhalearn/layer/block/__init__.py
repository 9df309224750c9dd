"""A whole block: attention, residual paths, norms and a feed-forward part."""
