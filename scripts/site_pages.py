"""Brings pages from outside docs/ onto the site, and rewrites links to fit it.

A link in a page names a file of the checkout, as the forge wants it. On the site that
file may stand elsewhere: README.md is the front page, and a file that is no page
becomes a file of the site. The pages of policies stand nowhere else: policy_pages.py
writes them.
Called by mkdocs, see mkdocs.yml.
"""

import re
import sys
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import policy_pages  # noqa: E402

DOCS = "docs/"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/gpu/README.md": "reports/gpu.md",
    "benchmarks/report/README.md": "reports/tables.md",
    "docker/README.md": "docker.md",
    "reasoner/README.md": "reasoner.md",
}
OUTSIDE |= {
    f"benchmarks/reports/{path.name}": f"reports/{path.name}"
    for path in sorted((ROOT / "benchmarks" / "reports").glob("*.md"))
}
"""Page of the checkout -> page of the site."""
CHECKOUT = "checkout/"
"""Folder of the site with the other files that pages link to."""
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of policies behind those of the methods."""
    entries = list(config.nav or [])
    places = [next(iter(entry)) for entry in entries]
    entries.insert(places.index("Methods") + 1, policy_pages.nav())
    config.nav = entries
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and those of policies."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for page, text in policy_pages.pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Return a page whose links lead to where the files are on the site."""
    here = page.file.src_uri
    folder = dirname(path_of(here))

    def rewrite(match: re.Match[str]) -> str:
        path = normpath(join(folder, match["path"]))
        place = place_of(path)
        if files.get_file_from_path(place) is None:
            if not (ROOT / path).is_file() or path.endswith(".md"):
                return match[0]  # mkdocs says that it is nowhere, or not in OUTSIDE
            file = File.generated(config, place, abs_src_path=str(ROOT / path))
            files.append(file)
        return relpath(place, dirname(here) or ".") + (match["anchor"] or "")

    return LINK.sub(rewrite, markdown)


def place_of(path: str) -> str:
    """Return where a file of the checkout stands on the site."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix(DOCS) if path.startswith(DOCS) else CHECKOUT + path


def path_of(place: str) -> str:
    """Return the file of the checkout that a page of the site comes from."""
    found = [path for path, page in OUTSIDE.items() if page == place]
    return found[0] if found else DOCS + place
