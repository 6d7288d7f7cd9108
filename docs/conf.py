"""Sphinx: ``sphinx-build -W --keep-going -b html docs OUT`` (``pip install -e '.[docs]'``)."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

import parallel3d  # noqa: E402

project = "parallel3d"
author = "parallel3d contributors"
copyright = f"2026, {author}"
version = release = parallel3d.__version__
exclude_patterns = ["_extensions", "pictures"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "public_names",
]

# Markdown: GitHub's anchors for headings, so that links work there and here.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# The reference: docstrings are Google's style, types stand in the signature.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

smartquotes = False

html_theme = "furo"
html_title = f"parallel3d {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
