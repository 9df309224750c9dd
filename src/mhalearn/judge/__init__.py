"""What may be said about a layer."""
