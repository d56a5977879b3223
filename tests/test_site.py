"""The docs site: it has every page and public name, all links lead somewhere, and nothing is fetched from others."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import actorrpc
from actorrpc import autograd, debug, errors, functions, nn, optim, profiler, testing

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODULES = ("autograd", "debug", "functions", "nn", "optim", "profiler")


def public_names() -> dict[str, object]:
    """Returns all that users may name, under the name that the reference has for it."""
    names: dict[str, object] = {}
    for name in actorrpc.__all__:
        names[f"actorrpc.{name}"] = getattr(actorrpc, name)
    for module in (autograd, debug, nn, optim, profiler, testing):
        names |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    own = [value for value in vars(functions).values() if getattr(value, "__module__", "") == functions.__name__]
    names |= {f"actorrpc.functions.{f.__name__}": f for f in own if inspect.isfunction(f) and f.__name__[0] != "_"}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__:
            names |= {} if name[0] == "_" or name in actorrpc.__all__ else {f"actorrpc.errors.{name}": value}
    return names


def test_the_reference_has_every_public_name_once() -> None:
    shown = Counter(
        re.findall(r"^::: (\S+)$", "".join(p.read_text() for p in (DOCS / "api").glob("*.md")), re.MULTILINE)
    )
    assert set(shown) == set(public_names()) | {f"actorrpc.{name}" for name in MODULES} | {"actorrpc.testing"}
    assert max(shown.values()) == 1


def test_every_public_name_and_what_it_has_says_what_it_is() -> None:
    silent = []
    for name, value in public_names().items():
        if not inspect.getdoc(value) and not isinstance(value, str | int | float):
            silent.append(name)
        if not inspect.isclass(value) or not value.__module__.startswith("actorrpc"):
            continue
        for part, what in vars(value).items():
            if part[0] != "_" and (callable(what) or isinstance(what, property | classmethod | staticmethod)):
                doc = inspect.getdoc(getattr(value, part) if not isinstance(what, property) else what)
                silent += [] if doc or isinstance(what, type) else [f"{name}.{part}"]
    assert silent == []


def test_every_page_has_its_place_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_pictures_are_those_that_the_script_draws() -> None:
    pictures = runpy.run_path(str(DOCS / "assets" / "make_concepts.py"))["PICTURES"]
    assert len(pictures) > 5
    for name, draw in pictures.items():
        assert (DOCS / "assets" / f"{name}.svg").read_text() == draw().svg(), name


class Page(HTMLParser):
    """What a page links to, fetches, and can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given.get("href", ""))
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.fetched.append(given["src"])


def is_elsewhere(address: str) -> bool:
    return re.match(r"\w+:", address) is not None


def faults_of(pages: dict[Path, Page]) -> list[str]:
    """Returns the links and files that lead nowhere, and what would be fetched from elsewhere."""
    faults = []
    for path, page in pages.items():
        for address in page.links + page.fetched:
            if is_elsewhere(address):
                faults += [f"{path.name} fetches {address}"] if address in page.fetched else []
                continue
            file, anchor = urldefrag(address)
            target = (path.parent / unquote(file)).resolve() if file else path
            if not target.is_file() and not (target / "index.html").is_file():
                faults.append(f"{path.name} has no {address}")
            elif (
                anchor and not anchor.startswith("__") and target in pages and unquote(anchor) not in pages[target].ids
            ):
                faults.append(f"{path.name}: {address} has no such place")
    return faults


def test_links_that_lead_nowhere_are_seen(tmp_path: Path) -> None:
    here = tmp_path / "index.html"
    here.touch()
    good = '<p id="a"><a href="#a"></a><a href="index.html#a"></a><a href="https://example.org"></a>'
    assert faults_of({here: Page(good)}) == []
    bad = '<a href="b.html"></a><a href="#c"></a><img src="d.png"><script src="https://example.org/e.js"></script>'
    assert len(faults_of({here: Page(bad)})) == 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site is built by the extra `docs`")
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_link_of_the_site_leads_somewhere_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) == len(list(DOCS.rglob("*.md")))
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert faults_of(pages) == []
    sheets = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", sheets) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_has_a_place_for_every_public_name(site: Path) -> None:
    api = list((site / "api").glob("*.html"))
    assert not [page.name for page in api if "<blockquote>" in page.read_text()]  # an example that is read as prose
    ids = set().union(*(page.ids for path, page in pages_of(site).items() if path.parent.name == "api"))
    assert {name for name in public_names() if name not in ids} == {f"actorrpc.{name}" for name in MODULES}
    assert "actorrpc.RRef.to_here" in ids  # and for what they have; a module's text is the head of its page
