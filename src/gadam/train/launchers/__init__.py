"""Where the jobs of a sweep run. Each module has a :class:`gadam.train.sweep.Launcher`."""
