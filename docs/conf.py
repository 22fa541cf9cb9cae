"""Configuration of the documentation site: `make docs` builds it from the pages as they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from make_tree import tree  # noqa: E402

from pipelines.settings import Settings  # noqa: E402
from pipelines.settings.recipe import Recipe  # noqa: E402

project = "Elastic training"
author = "The maintainers"
html_theme = "furo"
html_title = project
html_extra_path = ["site"]
"""Holds the page at the root of the site, which leads to the README."""
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.mermaid"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/README.md"]
exclude_patterns = ["build", ".venv", "runs", "elastic", "actors", "pipelines", "tests"]
highlight_language = "text"
default_role = "code"

myst_heading_anchors = 4
myst_fence_as_directive = {"mermaid"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

MAX_WHOLE = 30
"""The most characters of code in a table that are kept in one line."""

_LINK = re.compile(r"\]\(([^)#]+\.md)\)")


def add_toctrees(app: Sphinx, document: str, source: list[str]) -> None:
    """Add to the index, after each section, a hidden toctree of the pages that it lists."""
    if document == root_doc:
        head, *sections = source[0].split("\n## ")
        source[0] = "\n## ".join([head, *(f"{s}\n{_toctree(s)}" for s in sections)])


def _toctree(section: str) -> str:
    caption = section.partition("\n")[0]
    pages = [f"/docs/{link}" for link in _LINK.findall(section)]
    pages = [page.replace("/docs/../", "/").removesuffix(".md") for page in pages]
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])


class SourceTree(SphinxDirective):
    """`{source-tree}`: one line for each source file, as `make_tree.py` prints it."""

    def run(self) -> list[nodes.Node]:
        return [nodes.literal_block(tree(), tree(), language="text")]


def link_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Lead links to source files to pages of the site that show them; folders become text."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    shown = app.env.__dict__.setdefault("shown_sources", set())
    for link in list(doctree.findall(addnodes.pending_xref)):
        if (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)
    for link in list(doctree.findall(addnodes.download_reference)):
        name = (folder / link["reftarget"]).resolve().relative_to(ROOT).as_posix()
        shown.add(name)
        up = "../" * app.env.docname.count("/")
        target = nodes.reference("", "", refuri=f"{up}source/{name}.html", internal=True)
        target.extend(link.children)
        link.replace_self(target)


def highlight_commands(app: Sphinx, doctree: nodes.document) -> None:
    """Indented blocks hold command lines: show their comments and strings in colour."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "none":
            block["language"] = "bash"


def keep_names_whole(app: Sphinx, doctree: nodes.document) -> None:
    """Browsers break `--run-name` after a hyphen; in tables, short code stays in one line."""
    for entry in doctree.findall(nodes.entry):
        for code in entry.findall(nodes.literal):
            if len(code.astext()) <= MAX_WHOLE:
                code["classes"].append("whole")


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """A page for each source file that another page links to."""
    for name in sorted(app.env.__dict__.get("shown_sources", ())):
        language = "python" if name.endswith(".py") else "text"
        text = (ROOT / name).read_text()
        code = app.builder.highlighter.highlight_block(text, language)
        yield f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>{code}"}, "page.html"


def hide_signature(
    app: Sphinx, what: str, name: str, thing: object, *_: object
) -> tuple[str, None] | None:
    """A table of fields replaces the signature of settings and recipes."""
    return ("", None) if _defaults(thing) else None


def list_fields(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Add to the docstring of a class of settings, or of `Recipe`, a table of its fields."""
    described = thing.model_fields if _is_settings(thing) else {}
    texts = {name: field.description or "" for name, field in described.items()}
    rows = [
        (f"``{field}``", f"``{thing.__annotations__[field]}``", default, texts.get(field, ""))
        for field, default in _defaults(thing).items()
    ]
    if rows:
        lines += [".. list-table::", "   :header-rows: 1", ""]
        for row in (("field", "type", "default", ""), *rows):
            lines += [f"   {'  -' if i else '* -'} {cell}" for i, cell in enumerate(row)]
        lines.append("")


def _is_settings(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Settings)


def _defaults(thing: object) -> dict[str, str]:
    """The default of each field of a class of settings, or of `Recipe`; else nothing."""
    if _is_settings(thing):
        return {name: _shown(field.default) for name, field in thing.model_fields.items()}
    return {f.name: _shown(f.default) for f in fields(thing)} if thing is Recipe else {}


def _shown(default: object) -> str:
    if default is MISSING:
        return ""
    if isinstance(default, Settings):
        return f"`{type(default).__name__}`"
    return f"``{getattr(default, '__name__', None) or repr(default)}``"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("source-tree", SourceTree)
    app.connect("source-read", add_toctrees)
    app.connect("doctree-read", link_sources, priority=100)
    app.connect("doctree-read", keep_names_whole)
    app.connect("doctree-read", highlight_commands)
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-docstring", list_fields)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": False}
