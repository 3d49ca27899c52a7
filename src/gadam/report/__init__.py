"""The report: run folders as one page, publication figures and tables.

Needs the extra ``gadam[report]``. It reads what is on the disk and nothing of the trainer's memory.
"""
