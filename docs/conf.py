"""The configuration of the documentation site. `make docs` builds it into build/site."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gadam

project = "gadam"
author = "gadam contributors"
version = release = gadam.__version__
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "tools.sphinx_extension",
]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!gadam\.).*"),  # other packages, and names without a module
    (r"py:.*", r"gadam\.\w+\.\w+\..*"),  # names that no package exports
    (r"py:mod", r"gadam\.\w+\.\w+"),  # modules of packages
]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
highlight_language = "text"

html_theme = "furo"
html_title = "gadam"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1f5fae", "color-brand-content": "#1f5fae"},
    "dark_css_variables": {"color-brand-primary": "#7db4f5", "color-brand-content": "#7db4f5"},
}
