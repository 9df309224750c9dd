"""What is learned: the layer, its numerics, and the class of layers considered."""
