"""Sphinx's configuration of the site: `make docs` builds docs/ into build/site, without a network."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

project = "mugrpo_megatron"
author = "The mugrpo_megatron maintainers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
html_theme = "furo"
html_title = "mugrpo_megatron"
html_show_sphinx = False
html_copy_source = False
# GitHub's anchors. check_links.py follows every link of the built site, those to ids in the text included, which MyST
# does not know.
myst_heading_anchors = 4
myst_heading_slug_func = "mugrpo_megatron.pages.slug"
suppress_warnings = ["myst.xref_missing", "myst.header"]
