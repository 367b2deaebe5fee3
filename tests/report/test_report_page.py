"""The HTML report is one inert file: no network, no foreign script, small. The runs are simulated."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paths import ReportCount
from simulated_run import _waits_for_no_disk, simulated_run  # noqa: F401
from whet.report.comparison import compare_runs
from whet.report.page import html
from whet.report.page.html import STATIC_FOLDER, report_page, shorten
from whet.report.run_report import summarize
from whet.run.events import EventLog
from whet.run.folder import create_run

STATIC = html.STATIC_FOLDER
OURS = sorted(path for path in STATIC.glob("*.js") if not path.name.startswith("uPlot"))
PAYLOADS = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=//evil.example/x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "]]></style><style>*{background:url(//evil.example)}</style>",
    "\u2028alert(1)\u2029",
    "\x1b[2J\x00",
    "{{7*7}}${alert(1)}",
)


class Parsed(HTMLParser):
    """The elements of a page, and what stands in its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag in ("script", "style", "title"):
            self.inside.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style", "title"):
            tag, text = self.inside[-1]
            self.inside[-1] = (tag, text + data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object]]:
    nasty = "".join(PAYLOADS)
    path = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>"
    plan = {"settings": {nasty: {"value": nasty, "reason": nasty, "source": nasty}}, "warnings": [nasty]}
    run = create_run(
        path,
        recipe=nasty,
        config={nasty: nasty},
        plan=plan,
        machine={"chip": nasty},
        versions={nasty: nasty},
        command=[nasty],
    )
    with EventLog(run) as log:
        log.append("start", step=0, goal=nasty)
        log.append("step", step=1, loss=1.0, **{nasty: 2.0})
        matrix = {"labels": [nasty], "counts": [[1]]}
        scores = {"labels": [nasty], nasty: [0.5]}
        log.append("eval", step=1, **{nasty: 1.0}, confusion=matrix, classes=scores, samples=[{nasty: nasty}])
        log.append("oom", step=1, reason=nasty * 20_000, action=nasty)
    view = summarize(run)
    return report_page(view), shorten(view.for_page().as_json())


def test_hostile_names_and_logs_are_inert(hostile: tuple[str, dict[str, object]], report_count: ReportCount) -> None:
    page, logged = hostile
    parsed = Parsed(page)
    names = [tag for tag, _ in parsed.tags]
    allowed = {"html", "head", "meta", "title", "style", "body", "div", "main", "noscript", "script"}
    assert set(names) <= allowed
    assert (names.count("script"), names.count("style")) == (3, 2)
    data = next(text for tag, text in parsed.inside if tag == "script")
    assert json.loads(data) == logged, "text of a run is unchanged, and only data"
    assert "<" not in data
    assert len(page) < 600_000, "a log line of megabytes is cut"
    report_count(f"{len(PAYLOADS)} payloads in 16 places of a run, 0 elements made of them")


def test_nothing_is_fetched_and_only_our_scripts_may_run(hostile: tuple[str, dict[str, object]]) -> None:
    parsed = Parsed(hostile[0])
    assert not [attrs for _, attrs in parsed.tags if {"src", "href", "action", "srcdoc"} & attrs.keys()]
    policy = next(attrs["content"] or "" for _, attrs in parsed.tags if "http-equiv" in attrs)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, count in (("script", 2), ("style", 2)):
        texts = [text for name, text in parsed.inside if name == tag][-count:]
        (listed,) = re.findall(rf"{tag}-src ([^;]+)", policy)
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts}
        assert set(listed.split()) == hashes


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script")
def test_slow_steps_are_not_called_throttled(tmp_path: Path) -> None:
    (tmp_path / "format.mjs").write_text((STATIC_FOLDER / "format.js").read_text())
    code = """import { eventName } from "./format.mjs";
    console.log(eventName("throttle", "warn"), eventName("throttle", "good"), eventName("oom", "bad"));"""
    (tmp_path / "main.mjs").write_text(code)
    done = subprocess.run(["node", "main.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["slower", "recovered", "oom"]


def test_a_report_is_small(tmp_path: Path, report_count: ReportCount) -> None:
    views = [summarize(simulated_run(tmp_path / name, steps=900)) for name in ("a", "b")]
    sizes = len(report_page(views[0]).encode()), len(report_page(compare_runs(views)).encode())
    assert sizes[0] < 400_000
    report_count(f"one run {sizes[0]:,} bytes, two runs {sizes[1]:,} bytes")


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_module_reads_anything_as_markup_or_code(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "new Function")
    assert not [way for way in (*ways, "createContextualFragment", "srcdoc", 'setAttribute("on') if way in source]
    assert not re.findall(r"https?://", source)
    assert "</script" not in source.lower()
    assert "<!--" not in source


def test_all_modules_of_a_page_become_one_script() -> None:
    for entry in ("report.js", "watch.js"):
        script = html.bundle_script(entry)
        assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
        for name in re.findall(r'modules\["([\w.]+)"\] = ', script):
            assert script.index(f'modules["{name}"] = ') <= script.index(f'modules["{name}"]'), "made before it is used"


@pytest.mark.parametrize(
    "line",
    ['import x from "./dom.js";', 'import { a as b } from "./dom.js";', "export default 1;", 'import "./dom.js";'],
)
def test_unsupported_module_syntax_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(html, "STATIC_FOLDER", tmp_path)
    (tmp_path / "dom.js").write_text("export const a = 1;\n")
    (tmp_path / "odd.js").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"odd\.js"):
        html.bundle_script.__wrapped__("odd.js")


def test_third_party_files_are_unmodified() -> None:
    listed = re.findall(r"\| `([\w.]+)` \| ([0-9a-f]{64}) \|", (STATIC / "THIRD_PARTY.md").read_text())
    assert len(listed) == 3
    for name, digest in listed:
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
