"""Recordings of attention blocks on real text, and the small things they are made with."""
