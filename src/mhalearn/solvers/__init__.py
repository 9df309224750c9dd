"""Least squares without policy."""
