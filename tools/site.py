"""Build the documentation site: copy the pages together, build them, check every link. Run it with `make docs-site`.

The pages stay where GitHub shows them: README.md, docs/, examples/, CONTRIBUTING.md. The site needs them in one folder,
so they are copied to build/site/pages, with their links changed to the new places. docs/zensical.toml has the order.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "site"
PROSE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
# A link or an image of Markdown: the text, the target without its anchor, the anchor.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
COMMANDS = ("python ", "whet ", "torchrun ")
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)


def staged_paths() -> dict[Path, Path]:
    """Return where each file of the repository lies in the copy, both as relative paths."""
    places = {Path(name): Path("index.md" if name == "README.md" else name) for name in PROSE}
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.is_file() and path.name != "zensical.toml" and path.suffix != ".json":
            inside = path.relative_to(ROOT / "docs")
            places[path.relative_to(ROOT)] = inside.with_name("index.md") if inside.name == "README.md" else inside
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in (".py", ".ipynb"):
            places[path.relative_to(ROOT)] = path.relative_to(ROOT).with_suffix(".md")
    places[Path("examples/README.md")] = Path("examples/index.md")
    # The site's index.md is the README of the repository.
    places[Path("docs/README.md")] = Path("all-pages.md")
    return places


def stage(places: dict[Path, Path], pages: Path) -> None:
    """Copy every file; Markdown gets its links changed, programs and notebooks become pages."""
    for source, place in places.items():
        target = pages / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix != ".md":
            shutil.copyfile(ROOT / source, target)
            continue
        text = (ROOT / source).read_text()
        if source.suffix == ".py":
            text = program_page(source, text)
        elif source.suffix == ".ipynb":
            text = notebook_page(text)
        change = partial(relink, source=source, places=places)
        target.write_text(outside_fences(text, lambda prose, change=change: for_python_markdown(change(prose))))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply a change to the text between code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def relink(text: str, source: Path, places: dict[Path, Path]) -> str:
    """Point links to the copies. A link to a file that is no page of the site keeps its text only."""

    def changed(match: re.Match[str]) -> str:
        image, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or urlsplit(target).scheme:
            return match[0]
        path = Path(os.path.normpath(source.parent / target))
        if (ROOT / path).is_dir():
            path /= "README.md"
        if path not in places:
            if not (ROOT / path).exists():
                raise SystemExit(f"error: {source} links to a file that does not exist\n  got: {target}")
            return label if label.startswith("`") else f"`{label}`"
        if re.fullmatch(r"[\w./-]+\.md", label):
            # GitHub shows files; the site shows pages by their titles.
            label = page_title(ROOT / path)
        new = os.path.relpath(places[path], places[source].parent)
        return f"{image}[{label}]({new}{anchor})"

    return LINK.sub(changed, text)


def for_python_markdown(text: str) -> str:
    """Add the empty line that Python-Markdown needs between a paragraph and a list, and GitHub does not."""
    return re.sub(r"^(?!\s|[-*|>#]|\d+\. )(.+)\n(?=(?:[-*]|1\.) )", r"\1\n\n", text, flags=re.MULTILINE)


def program_page(source: Path, code: str) -> str:
    """Return the page of an example: its first line as the title, then the program."""
    about, _, rest = code.partition('"""')[2].partition('"""')
    title, _, usage = about.partition("\n")
    lines = usage.splitlines()
    commands = "".join(f"$ {line}\n" for line in lines if line.startswith(COMMANDS))
    prose = "\n".join(line for line in lines if not line.startswith(COMMANDS)).strip()
    return f"# {source.stem}\n\n{title}\n\n{prose}\n\n```console\n{commands}```\n\n```python\n{rest.strip()}\n```\n"


def notebook_page(text: str) -> str:
    """Return the cells of a notebook as Markdown."""
    cells = json.loads(text)["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(body if kind == "markdown" else f"```python\n{body}\n```" for kind, body in sources) + "\n"


def filled_nav(nav: list[dict[str, object]], pages: Path) -> list[dict[str, object]]:
    """Replace folders ("rules/") by all their pages: the index first, then the others in the order of its links."""
    filled: list[dict[str, object]] = []
    for entry in nav:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            value = filled_nav(value, pages)
        elif isinstance(value, str) and value.endswith("/"):
            index = pages / value / "index.md"
            inside = set(index.parent.rglob("*.md"))
            linked = (index.parent / match[3] for match in LINK.finditer(index.read_text()))
            found = list(dict.fromkeys([index, *(path for path in linked if path in inside)]))
            found += sorted(inside - set(found))
            value = [{page_title(path): path.relative_to(pages).as_posix()} for path in found]
        filled.append({title: value})
    return filled


def page_title(path: Path) -> str:
    match = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"error: a page has no title\n  got: {path.name}\n  try: begin it with '# Title'")
    return match[1].replace("`", "")


def wrong_titles(nav: list[dict[str, object]], pages: Path) -> Iterator[str]:
    """Yield the pages whose title is another than in the order of pages. The first page is the README."""
    for entry in nav:
        for title, value in entry.items():
            if isinstance(value, list):
                yield from wrong_titles(value, pages)
            elif value != "index.md" and (pages / str(value)).exists():
                found = page_title(pages / str(value))
                if found != title:
                    yield f"{value}: the title is {found!r}, and {title!r} in docs/zensical.toml"


def nav_pages(nav: list[dict[str, object]]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, list):
                yield from nav_pages(value)
            else:
                yield str(value)


class PageLinks(HTMLParser):
    """Collect the links, the loaded files and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loaded.append(values.get("href", ""))
        elif "src" in values:
            self.loaded.append(values["src"])


def check(site: Path) -> list[str]:
    """Return what is wrong with a built site: links and anchors that lead nowhere, files loaded from elsewhere."""
    parsed: dict[Path, PageLinks] = {}
    for path in sorted(site.rglob("*.html")):
        parsed[path.resolve()] = page = PageLinks()
        page.feed(path.read_text())
    faults = []
    for path, page in parsed.items():
        name = path.relative_to(site.resolve())
        # The page for addresses that do not exist has links from the root of a server.
        if name.name == "404.html":
            continue
        for target in (*page.links, *page.loaded):
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if target in page.loaded and url.scheme != "data":
                    faults.append(f"{name}: loads {target}")
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                faults.append(f"{name}: no file {target}")
            elif url.fragment and file in parsed and unquote(url.fragment) not in parsed[file].anchors:
                faults.append(f"{name}: no anchor {target}")
    for path in site.rglob("*.css"):
        urls = re.findall(r"url\(['\"]?(https?:[^)'\"]+)", path.read_text())
        faults += [f"{path.relative_to(site)}: loads {url}" for url in urls]
    return sorted(set(faults))


def build(out: Path) -> list[str]:
    """Build the site into `out`/site and return its faults."""
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    stage(staged_paths(), pages)
    config = (ROOT / "docs" / "zensical.toml").read_text()
    nav = filled_nav(tomllib.loads(config)["project"]["nav"], pages)
    listed = list(nav_pages(nav))
    faults = [f"the order of docs/zensical.toml names {name} twice" for name in set(listed) if listed.count(name) > 1]
    faults += [f"{name}: no such page" for name in listed if not (pages / name).exists()]
    written = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    faults += [f"{name}: not in the order of docs/zensical.toml" for name in sorted(written - set(listed))]
    faults += wrong_titles(nav, pages)
    if faults:
        return faults
    # A nav in JSON is one in TOML but for the colons.
    text = re.sub(r"^nav = \[.*?^\]$", lambda _: f"nav = {_toml(nav)}", config, flags=re.MULTILINE | re.DOTALL)
    (out / "zensical.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=out, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return [(done.stdout + done.stderr).strip()]
    return check(out / "site")


def _toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the copy and the site")
    out = parser.parse_args().out
    faults = build(out)
    for fault in faults:
        print(fault)
    if not faults:
        print(f"{len(list((out / 'site').rglob('*.html')))} pages: {out / 'site' / 'index.html'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
