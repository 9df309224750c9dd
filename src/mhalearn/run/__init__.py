"""What accompanies a run: its outcome, events, clock and checkpoint."""
