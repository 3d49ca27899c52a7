"""Fault injection: kill programs, damage files, fill the disk, and compare what is left.

``make chaos`` runs it at full length and writes `results/chaos.json`. ``make test-all`` runs a
small sample.
"""
