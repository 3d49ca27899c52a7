"""Averaging against its rivals on real data: tuning, final seeds, and one record per run."""
