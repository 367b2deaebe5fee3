"""A release contains what belongs into it, and the workflows run pinned actions and commands that exist."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", ".gitignore")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import release

    return release


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what a release is built from, beside folders that must stay out of it."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docs/rules/README.md", "tests/test_one.py", "runs/mine/run.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def build(folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build"], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def test_release_has_no_tests_and_no_stray_files(release, copy: Path) -> None:
    assert release.check(build(copy)) == []


def test_stray_files_are_found_by_name(release, copy: Path) -> None:
    for name in ("src/whet/plan/tests/test_one.py", "src/whet/data/rows.bin", "src/whet/data/rows.json"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("x" * (300_000 if name.endswith("json") else 1))
    pyproject = (copy / "pyproject.toml").read_text()
    assert '"/README.md"' in pyproject
    (copy / "pyproject.toml").write_text(pyproject.replace('"/README.md"', '"README.md"'))
    faults = release.check(build(copy))
    assert "the sdist contains docs/rules/README.md" in faults
    for archive, prefix in (("the wheel", ""), ("the sdist", "src/")):
        assert f"{archive} contains {prefix}whet/plan/tests/test_one.py" in faults
        assert f"{archive} contains {prefix}whet/data/rows.bin" in faults
        assert f"{archive} contains {prefix}whet/data/rows.json of 300 kB; at most 262 kB" in faults
    assert len(faults) == 7


def test_missing_files_are_found(release) -> None:
    assert [fault for fault in release.wheel_faults({}, version="1.0") if "py.typed" in fault]
    assert "the sdist has no LICENSE" in release.sdist_faults({}, version="1.0")


def test_version_has_one_source_and_the_tag_must_match_it(release) -> None:
    from whet.base.version import VERSION

    assert release.declared_version() == VERSION
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    changelog = "# Changelog\n\n## [1.2.0] - 2027-01-31\n\n- x\n"
    assert release.tag_faults("v1.2.0", version="1.2.0", changelog=changelog) == []
    assert release.tag_faults("v1.3.0", version="1.2.0", changelog=changelog) != []
    assert release.tag_faults("v1.3.0", version="1.3.0", changelog=changelog) != []
    assert release.tag_faults("v1.2.0", version="1.2.0", changelog="## [Unreleased]\n") != []


def test_changelog_keeps_its_form() -> None:
    """Sections in the form of Keep a Changelog; a new line belongs under Added, Changed or Fixed of Unreleased."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release) for release in releases[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", changelog, re.MULTILINE)) <= kinds
    before = changelog.partition("### ")[0]
    assert not re.search(r"^- ", before, re.MULTILINE), "a line outside Added, Changed and Fixed"


# --- workflows -------------------------------------------------------------------------------------------------------


def unpinned_actions(text: str) -> list[str]:
    """Return the actions that are not pinned to a commit with the tag in a comment. Local workflows need no pin."""
    used = re.findall(r"^\s*(?:- )?uses: *(.*)$", text, re.MULTILINE)
    pinned = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/[\w-]+\.yml")
    return [action for action in used if not pinned.fullmatch(action)]


def unknown_commands(workflow: dict, makefile: str) -> list[str]:
    """Return the commands that are not `make TARGET [NAME=VALUE ...]` with names that the Makefile knows."""
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    variables = set(re.findall(r"\$\((\w+)\)", makefile))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job.get("steps", []) if "run" in step]
    wrong = []
    for command in commands:
        # An expression or a quoted value may contain spaces.
        program, *words = re.sub(r'\$\{\{.*?\}\}|".*?"', "x", command).split()
        names = {word.partition("=")[0] for word in words if "=" in word}
        if program != "make" or not names <= variables or not {word for word in words if "=" not in word} <= targets:
            wrong.append(command)
    return wrong


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_pinned_actions_and_known_commands(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert unpinned_actions(path.read_text()) == []
    assert unknown_commands(workflow, (ROOT / "Makefile").read_text()) == []
    assert workflow["permissions"] == {"contents": "read"}


def test_planted_faults_of_workflows_are_found() -> None:
    pin = "a" * 40
    for fault in ("actions/checkout@v4", f"actions/checkout@{pin}", "actions/checkout@main # v4.0.0", "docker://x:1"):
        assert unpinned_actions(f"      - uses: actions/x@{pin} # v1.0.0\n      - uses: {fault}\n") == [fault]
    makefile = ".PHONY: test\ntest:\n\tpytest $(MARKS)\n"
    for fault in ("make tset", "pip install whet", "make test MARK=1", "curl x | sh"):
        assert unknown_commands({"jobs": {"a": {"steps": [{"run": fault}]}}}, makefile) == [fault]
    assert unknown_commands({"jobs": {"a": {"steps": [{"run": 'make test MARKS="not slow"'}]}}}, makefile) == []


def test_tested_versions_of_torch_are_allowed_and_begin_with_the_oldest() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    oldest, newest = (entry["torch"] for entry in jobs["linux-torch"]["strategy"]["matrix"]["include"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (Requirement(text) for text in project["dependencies"] if text.startswith("torch"))
    assert f">={oldest.removesuffix('.0')}" in str(torch)
    assert newest in torch.specifier
    assert Version(newest) > Version(oldest)


def test_only_the_job_that_publishes_has_an_identity() -> None:
    jobs = {
        f"{path.stem}.{name}": job.get("permissions", {})
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    }
    assert [name for name, permissions in jobs.items() if "write" in permissions.values()] == ["release.publish"]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["publish"]["needs"] == ["try", "gate"]
    assert release["jobs"]["publish"]["environment"] == "pypi"
