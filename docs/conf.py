"""How the documentation is built: `make docs` writes it to `build/docs`.

Pages are Markdown that GitHub shows too. What stands in the code is taken from there: docstrings by
autodoc, options by `memplan COMMAND --help` (the directive `command-help`).
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import memplan
from memplan.cli import main

os.environ["COLUMNS"] = "96"  # the width of what --help prints

project = "memplan"
author = "the authors of memplan"
release = version = memplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "memplan"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False
html_copy_source = False
highlight_language = "none"
default_role = "code"
"""Docstrings write `name` as Markdown does."""

myst_heading_anchors = 4
"""Headings can be linked to as on GitHub: `page.md#the-heading`."""
autodoc_typehints = "signature"
autodoc_member_order = "bysource"


class CommandHelp(Directive):
    """What `memplan COMMAND --help` prints; without a command, `memplan --help`."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        with redirect_stdout(printed):
            code = main([*self.arguments, "--help"])
        if code:
            raise self.error(f"memplan {' '.join(self.arguments)} --help ends with {code}")
        block = nodes.literal_block(printed.getvalue(), printed.getvalue())
        block["language"] = "none"
        return [block]


def setup(app: Sphinx) -> None:
    app.add_directive("command-help", CommandHelp)
