"""One head for every page that this package writes: one file each, light and dark, nothing from the network.

>>> print(fill("<p><!--text--></p>", {"text": "295 columns"}))
<p>295 columns</p>
"""

from collections.abc import Mapping
from html import escape
from importlib.resources import files

import blocktable

__all__ = ["fill", "write_page"]


def write_page(package: str, template: str, parts: Mapping[str, str], *, title: str, scripts: bool = False) -> str:
    """Return a page from a template of a package, its places ``<!--NAME-->`` filled; ``scripts`` of its own may run."""
    always = {
        "head": files("blocktable").joinpath("head.html").read_text(encoding="utf-8"),
        "policy": "script-src 'unsafe-inline'; " if scripts else "",
        "title": escape(title),
        "version": escape(blocktable.__version__),
    }
    return fill(files(package).joinpath(template).read_text(encoding="utf-8"), {**always, **parts})


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Fill places one after the other: what the last one brings is not searched any more."""
    for name, part in parts.items():
        template = template.replace(f"<!--{name}-->", part)
    return template
