"""Averages in the trainers of other frameworks. Each module needs the extra of the same name."""
