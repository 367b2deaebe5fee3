"""The documentation site builds, every page is reachable, and `tools/site.py` finds what is wrong with one."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    """tools/site.py; the standard library has a module of the same name."""
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["site_tool"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["site_tool"]


@pytest.fixture(scope="module")
def built(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    faults = site.build(out)
    assert faults == []
    return out


def test_every_page_is_built_and_can_be_searched_offline(built: Path) -> None:
    pages = {path.relative_to(built / "pages").with_suffix("") for path in (built / "pages").rglob("*.md")}
    assert len(pages) > 100
    html = {path.relative_to(built / "site").with_suffix("") for path in (built / "site").rglob("*.html")}
    assert pages <= html
    for source in (
        "README.md",
        "CONTRIBUTING.md",
        "examples/gan.py",
        "examples/notebook.ipynb",
        "docs/rules/README.md",
    ):
        assert (ROOT / source).exists()
    for page in ("index", "CONTRIBUTING", "examples/gan", "examples/notebook", "rules/index"):
        assert Path(page) in html
    index = (built / "site" / "search.js").read_text()
    assert "whet prove" in index


@pytest.mark.parametrize(
    ("markup", "fault"),
    [
        ('<a href="nowhere.html">x</a>', "no file nowhere.html"),
        ('<a href="goals.html#nowhere">x</a>', "no anchor goals.html#nowhere"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="https://cdn.example/x.css">', "loads https://cdn.example/x.css"),
        ('<img src="pictures/nowhere.png">', "no file pictures/nowhere.png"),
    ],
)
def test_a_broken_page_is_found(markup: str, fault: str, site: ModuleType, built: Path, tmp_path: Path) -> None:
    for name in ("index.html", "goals.html"):
        shutil.copyfile(built / "site" / name, tmp_path / name)
    before = set(site.check(tmp_path))
    index = tmp_path / "index.html"
    index.write_text(index.read_text().replace("</body>", f"{markup}</body>"))
    assert set(site.check(tmp_path)) - before == {f"index.html: {fault}"}


def test_a_page_outside_the_order_and_a_dead_link_stop_the_build(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, copy / name)
    for name in (*site.PROSE, "CITATION.cff"):
        shutil.copyfile(ROOT / name, copy / name)
    (copy / "src").symlink_to(ROOT / "src")
    monkeypatch.setattr(site, "ROOT", copy)
    (copy / "docs" / "forgotten.md").write_text("# Forgotten\n")
    assert site.build(tmp_path / "out") == ["forgotten.md: not in the order of docs/zensical.toml"]
    (copy / "docs" / "forgotten.md").unlink()
    goals = (copy / "docs" / "goals.md").read_text()
    (copy / "docs" / "goals.md").write_text(goals.replace("# Goals and early stopping", "# Aims", 1))
    (fault,) = site.build(tmp_path / "out")
    assert fault == "goals.md: the title is 'Aims', and 'Goals and early stopping' in docs/zensical.toml"
    (copy / "docs" / "goals.md").unlink()
    with pytest.raises(SystemExit, match="links to a file that does not exist"):
        site.build(tmp_path / "out")


def test_commands_of_an_example_are_code(site: ModuleType) -> None:
    page = site.program_page(Path("examples/a.py"), '"""Check it.\n\nMore.\n\nwhet check examples/a.py\n"""\n\nx = 1\n')
    assert page == "# a\n\nCheck it.\n\nMore.\n\n```console\n$ whet check examples/a.py\n```\n\n```python\nx = 1\n```\n"


def test_links_to_code_keep_their_text(site: ModuleType) -> None:
    places = {Path("docs/a.md"): Path("a.md"), Path("examples/gan.py"): Path("examples/gan.md")}
    text = "[loop](../src/whet/training/loop.py), [GAN](../examples/gan.py), [this](#part), [web](https://example.com)"
    changed = site.relink(text, Path("docs/a.md"), places)
    assert changed == "`loop`, [GAN](examples/gan.md), [this](#part), [web](https://example.com)"
    places[Path("docs/goals.md")] = Path("goals.md")
    assert site.relink("[goals.md](goals.md)", Path("docs/a.md"), places) == "[Goals and early stopping](goals.md)"
    assert site.for_python_markdown("Text:\n- one\n- two\n") == "Text:\n\n- one\n- two\n"
