"""Scripts that write pages of the documentation, and draw their figures, from the results."""
