"""The documentation as a site: the pages of this folder, by Sphinx with MyST.

python -m sphinx -W --keep-going -n -b html docs build/site
"""

project = "pytest-specdecode"
copyright = "The pytest-specdecode developers"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Checks draft models before they are served",
    "fixed_sidebar": True,
    # A console of 100 columns fits.
    "page_width": "1300px",
    "body_max_width": "1060px",
}
html_show_sourcelink = False
html_copy_source = False
# Anchors as the same Markdown has them elsewhere, so that one link serves both.
myst_heading_anchors = 4
# An indented block is a command or a formula, no Python.
highlight_language = "none"
