"""The report: run folders as one HTML page, publication figures, and tables.

Needs the extra ``gadam[report]``. It reads records from disk, through :mod:`gadam.runs`.

=====================  ==================================================================
``write.py``           write the page, figures and tables to a folder
``page.py``            assemble the HTML page from ``page.html``, ``page.css``, ``page.js``
``serve.py``           serve the page while a sweep runs
``series.py``          the numbers behind the charts: learning curves, rates, costs
``style.py``           colors and line styles of all charts
``vega_specs.py``      the page's charts, as Vega-Lite specifications
``figures.py``         the same charts as PNG and SVG files
``tables.py``          tables on the page, and as Markdown, LaTeX and CSV
``sections.py``        extra sections that other parts of the library add to the page
``chart.py``           a chart of curves and points as data, drawn for the page or a file
``theory_figures.py``  the charts of ``gadam theory``
=====================  ==================================================================
"""

from gadam.report.errors import ReportError
from gadam.report.page import render
from gadam.report.write import write

__all__ = ["ReportError", "render", "write"]
