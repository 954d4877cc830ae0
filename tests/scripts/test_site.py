"""The docs as a site: it builds without a warning, and reads as the forge shows it."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from vllm_kvpolicy.policies import names
from vllm_kvpolicy.policies.names import TESTS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import policy_pages  # noqa: E402

HAS_MKDOCS = all(find_spec(name) for name in ("mkdocs", "material"))
pytestmark = pytest.mark.skipif(
    not HAS_MKDOCS, reason="mkdocs-material is not installed: `make setup` does it"
)
# What a page consists of; text within paragraphs is the same by construction.
PARTS = ("table", "tr", "ul", "ol", "li", "pre", "h1", "h2", "h3", "strong", "img")
PAGES = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "docker": "docker/README.md",
    "reasoner": "reasoner/README.md",
    "reports/gpu": "benchmarks/gpu/README.md",
    "reports/tables": "benchmarks/report/README.md",
} | {
    str(path.relative_to(ROOT / "docs").with_suffix("")).replace(
        "README", "index"
    ): str(path.relative_to(ROOT))
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
PAGES |= {
    f"reports/{path.stem}": str(path.relative_to(ROOT))
    for path in sorted((ROOT / "benchmarks" / "reports").glob("*.md"))
}


def build(
    folder: Path, config: Path = ROOT / "mkdocs.yml"
) -> subprocess.CompletedProcess:
    """Run mkdocs as `make site` does, but into another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(config), "--site-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def parts_of(html: str) -> dict[str, int]:
    text = re.sub(r"<!--.*?-->", "", html, flags=re.DOTALL)
    return {part: len(re.findall(rf"<{part}[ >]", text)) for part in PARTS}


def article(path: Path) -> str:
    return path.read_text().partition("<article")[2].partition("</article>")[0]


def test_every_page_is_compared(site: Path) -> None:
    built = [path for path in site.rglob("*.html") if "<article" in path.read_text()]
    pages = {str(path.relative_to(site).with_suffix("")) for path in built}
    written = {page.removesuffix(".md") for page in policy_pages.pages()}
    assert pages - {"404"} == set(PAGES) | written


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_parts_that_the_forge_shows(site: Path, page: str) -> None:
    """Python-Markdown and CommonMark differ in lists: what is in one takes 4 spaces."""
    forge = MarkdownIt("commonmark").enable("table")
    shown = forge.render((ROOT / PAGES[page]).read_text())
    assert parts_of(article(site / f"{page}.html")) == parts_of(shown)


WORDS = {page: word for page, _, word, _ in policy_pages.words()}


def test_every_word_of_a_name_has_a_page() -> None:
    words = {word for name in names.parts() for word in re.split(r"[-+]", name)}
    assert words - set(TESTS) == set(WORDS.values()) - {""}


@pytest.mark.parametrize("page", WORDS)
def test_a_policy_has_its_formula_its_source_and_its_rows(
    site: Path, page: str
) -> None:
    html = article((site / page).with_suffix(".html"))
    split = re.split(r'<h2 id="([^"]+)".*?</h2>', html, flags=re.DOTALL)[1:]
    sections = dict(zip(split[::2], split[1::2], strict=True))
    formula = sections["formula"]
    assert re.search(r"<code .*[:=]", formula) and len(formula) > 80
    assert re.search(r'href="https://|[Tt]his project|Hard-KV', sections["source"])
    assert sections["deviations"].strip() and sections["options"].strip()
    assert sections["when-to-use-it"].strip()
    # Words with figures in the docs' main tables have them here, too.
    if WORDS[page] in ("snapkv", "expected", "ams", "hard", "wgkv", "dms", "quest"):
        assert re.search(r"<td>.*\[-?[\d.]+, -?[\d.]+\]", sections["measured"])


def test_every_link_leads_to_a_file_of_the_site(site: Path) -> None:
    lost, count = [], 0
    for path in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#]+)', path.read_text()):
            # The page for wrong addresses names the root of the site.
            if not re.match(r"(?:https?|data|mailto):|/", target):
                count += 1
                if not (path.parent / target).exists():
                    lost.append(f"{path.relative_to(site)}: {target}")
    assert lost == [] and count > 1000
