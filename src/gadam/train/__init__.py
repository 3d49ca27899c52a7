"""Training: data, models, recipes, the one loop, records and sweeps.

Needs the extra ``gadam[train]``.
"""
