"""The documentation as a site: ``make docs``. Pages are Markdown; the reference is rendered from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

import lowlevel_zero

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from messages import page  # noqa: E402

project = "lowlevel_zero"
author = "The lowlevel_zero developers"
copyright = "the lowlevel_zero developers, Apache-2.0"
release = version = lowlevel_zero.__version__

# The source folder is the project's root, so that links between README, pages, examples and pictures are as on disk.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/results/misses.md"]
exclude_patterns = ["docs/_build", "CODE_OF_CONDUCT.md"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages begin with a heading of level 1 and may skip a level in tables of options

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["colossalai", "accelerate", "lightning", "transformers"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "lowlevel_zero"
html_copy_source = False


def setup(app: object) -> None:
    """Write the page of messages, and have the site's address lead to its first page, which lies in a folder."""
    (HERE / "reference" / "messages.md").write_text(page())

    def redirect(app: object, error: Exception | None) -> None:
        if error is None:
            text = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
            Path(app.outdir, "index.html").write_text(text)  # type: ignore[attr-defined]

    app.connect("build-finished", redirect)  # type: ignore[attr-defined]
