"""Training: data, models, tasks, the training loop, sweeps and the catalog of experiments.

Needs the extra ``gadam[train]``.
"""
