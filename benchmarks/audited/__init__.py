"""Boxes with a known fault, written without the code that is asked to name it."""
