"""The local page: choose a layer, watch it being learned. Served on loopback only."""
