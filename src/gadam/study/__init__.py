"""Measure finished runs and report the results: the engine of `gadam analyze`.

Needs the extra ``gadam[report]``. Each part of the analysis is one file with a subclass of
:class:`gadam.study.part.Part`: its title, what it needs, what it measures, and its section of the
report. To add a part, add a file.

======================  ======================================================================
``diversity.py``, …     the parts; ``gadam analyze --help`` lists them
``part.py``             the base class of parts, and how parts are found
``points.py``           the weights of a run: kept iterates, the last one, the average
``predictions.py``      test-set predictions at a point, shared by several parts
``hessian.py``          curvature at a point, shared by several parts
``notebook.py``         measured values on disk, so that nothing is measured twice
``job.py``              measure one run, alone or in a sweep
``measured.py``         the values of many runs, as sections read them
``section.py``          build a section of the report, and format its numbers
``decay.py``            charts over weight decay
``report.py``           build and write the sections of all parts
``settings.py``         how closely to measure
======================  ======================================================================

A run's folder gets ``analysis.jsonl``, with one line per value, and ``predictions/*.pt``, a cache
that can be deleted at any time.
"""

from gadam.study.job import StudyJob, StudyResult, measure
from gadam.study.notebook import Notebook
from gadam.study.part import Part, Study, Unit, find, parts
from gadam.study.report import build_sections, write_sections
from gadam.study.settings import Settings, StudyError

__all__ = [
    "Notebook",
    "Part",
    "Settings",
    "Study",
    "StudyError",
    "StudyJob",
    "StudyResult",
    "Unit",
    "build_sections",
    "find",
    "measure",
    "parts",
    "write_sections",
]
