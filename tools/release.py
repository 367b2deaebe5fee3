"""Check a release before it is published: its tag, its files, and whether the wheel works in an empty environment.

    python tools/release.py check DIR [TAG]          names, versions and contents of the sdist and the wheel
    python tools/release.py try WHEEL [CONSTRAINTS]  install it without a compiler on PATH, plan, train; sizes and times

`make dist` and `make try-wheel` call it. It needs nothing but Python.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
# What a package consists of: code, the sources of the virtual Mac, tables, pages. Anything else is a stray file.
_SUFFIXES = {".py", ".typed", ".cpp", ".h", ".json", ".toml", ".js", ".css", ".html", ".svg", ".md", ".txt"}
_STRAY_FOLDERS = {"test", "tests", "__pycache__", "runs", "docs", "benchmarks", "examples"}
_SDIST_FILES = {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
_MAX_FILE_BYTES = 256 * 1024

_OWN_MODEL = """
import torch
import whet

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = whet.train(model, loader, loss=torch.nn.MSELoss(), optimizer=optimizer, epochs=3, run="runs/own", device="cpu")
assert run.state == "done" and run.step == 48, run
"""


def main(words: list[str]) -> int:
    match words:
        case ["check", folder, *tag] if len(tag) <= 1:
            faults = check(Path(folder), tag=tag[0] if tag else None)
            for fault in faults:
                print(f"error: {fault}")
            return 1 if faults else 0
        case ["try", wheel, *constraints] if len(constraints) <= 1:
            try_wheel(Path(wheel).resolve(), constraints=Path(constraints[0]).resolve() if constraints else None)
            return 0
    print(__doc__)
    return 2


# --- the tag and the files -------------------------------------------------------------------------------------------


def check(folder: Path, *, tag: str | None = None) -> list[str]:
    """Return what is wrong with the files of a release, and with its tag if there is one."""
    version = declared_version()
    wheel, sdist = folder / f"whet-{version}-py3-none-any.whl", folder / f"whet-{version}.tar.gz"
    made = sorted(path.name for path in folder.iterdir())
    if made != sorted([wheel.name, sdist.name]):
        return [f"{folder} must hold one wheel and one sdist of version {version}, got {made}"]
    faults = [] if tag is None else tag_faults(tag, version=version, changelog=(ROOT / "CHANGELOG.md").read_text())
    with zipfile.ZipFile(wheel) as archive:
        faults += wheel_faults({info.filename: info.file_size for info in archive.infolist()}, version=version)
    with tarfile.open(sdist) as archive:
        faults += sdist_faults({member.name: member.size for member in archive}, version=version)
    for path in (wheel, sdist):
        print(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")
    return faults


def declared_version() -> str:
    """Return the version from the one place that declares it, without importing whet."""
    text = (ROOT / "src" / "whet" / "base" / "version.py").read_text()
    return re.search(r'VERSION = "(.*)"', text)[1]


def tag_faults(tag: str, *, version: str, changelog: str) -> list[str]:
    """Return what is wrong with a tag: it must name the version, and the changelog must have a section for it."""
    faults = [] if tag == f"v{version}" else [f"the tag is {tag}, but base/version.py says {version}"]
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        faults.append(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")
    return faults


def wheel_faults(sizes: Mapping[str, int], *, version: str) -> list[str]:
    """Return the files of a wheel that do not belong there, and the required ones that are missing."""
    metadata = f"whet-{version}.dist-info"
    faults = [f"the wheel has no {name}" for name in ("whet/__init__.py", "whet/py.typed") if name not in sizes]
    faults += [f"the wheel has no {name}" for name in (f"{metadata}/licenses/LICENSE",) if name not in sizes]
    faults += [f"the wheel contains {name}" for name in sizes if name.split("/")[0] not in ("whet", metadata)]
    package = {name: size for name, size in sizes.items() if name.startswith("whet/")}
    return [*faults, *_package_faults("the wheel", package)]


def sdist_faults(sizes: Mapping[str, int], *, version: str) -> list[str]:
    """Return the files of an sdist that do not belong there, and the required ones that are missing."""
    inside = {name.removeprefix(f"whet-{version}/"): size for name, size in sizes.items()}
    package = {name: size for name, size in inside.items() if name.startswith("src/whet/")}
    faults = [f"the sdist contains {name}" for name in inside.keys() - package.keys() - _SDIST_FILES]
    faults += [f"the sdist has no {name}" for name in _SDIST_FILES - inside.keys()]
    return [*sorted(faults), *_package_faults("the sdist", package)]


def _package_faults(archive: str, sizes: Mapping[str, int]) -> Iterable[str]:
    for name, size in sizes.items():
        path = PurePosixPath(name)
        if path.suffix not in _SUFFIXES or _STRAY_FOLDERS.intersection(path.parts):
            yield f"{archive} contains {name}"
        if size > _MAX_FILE_BYTES:
            yield f"{archive} contains {name} of {size / 1e3:.0f} kB; at most {_MAX_FILE_BYTES / 1e3:.0f} kB"


# --- the wheel in an empty environment -------------------------------------------------------------------------------


def try_wheel(wheel: Path, *, constraints: Path | None = None) -> None:
    """Install the wheel into an empty environment without a compiler, plan and train there; print sizes and times."""
    with tempfile.TemporaryDirectory(prefix="whet-wheel-") as name:
        folder = Path(name).resolve()
        venv.create(folder / "env", with_pip=True)
        programs = folder / "env" / "bin"
        # Not through whet.base.env: this file runs where whet is not installed.
        inherited = os.environ.items()  # noqa: TID251
        environment = {key: value for key, value in inherited if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        # Only the programs of the environment: a step that needs a compiler, git or make fails.
        environment |= {"PATH": str(programs), "HOME": str(folder), "WHET_HOME": str(folder / "home")}
        reviews = [f"{word} film {i},{label}" for i in range(200) for word, label in (("good", "yes"), ("bad", "no"))]
        (folder / "reviews.csv").write_text("\n".join(["text,label", *reviews, ""]))
        (folder / "own.py").write_text(_OWN_MODEL)

        def run(*words: str | Path, expect: str = "") -> None:
            start = time.monotonic()
            command = [str(programs / words[0]), *map(str, words[1:])]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
            seconds = time.monotonic() - start
            shown = " ".join(word.name if isinstance(word, Path) else word for word in words)
            if done.returncode or expect not in done.stdout:
                sys.exit(f"error: {shown}\n  got: code {done.returncode}\n{done.stdout}{done.stderr}")
            print(f"{seconds:7.1f} s  {shown}", flush=True)

        run(
            "pip", "install", "-qq", "--disable-pip-version-check", *(["-c", constraints] if constraints else []), wheel
        )
        packages = next((folder / "env" / "lib").glob("python3.*/site-packages"))
        sizes = {name: _megabytes(packages / name) for name in ("whet", "torch")}
        everything = _megabytes(packages)
        rest = everything - sum(sizes.values())
        print(
            f"{everything:7.0f} MB installed: whet {sizes['whet']:.1f}, torch {sizes['torch']:.0f}, others {rest:.0f}"
        )
        run("whet", "--version", expect=f"whet {wheel.name.split('-')[1]}")
        run("whet", "--help", expect="doctor")
        run("whet", "plan", "text", "--machine", "m2-air-8gb", expect="micro_batch")
        run("whet", "plan", "text", expect="micro_batch")
        # On the CPU: hosted Macs offer an MPS device that cannot be used.
        words = ("data=reviews.csv", "max_steps=20", "--device", "cpu", "--run", "runs/text")
        # The state in JSON, because the words of a summary change.
        run("whet", "train", "text", *words)
        run("whet", "report", "runs/text", "--json", expect='"state": "done"')
        run("whet", "predict", "runs/text", "a good film", expect="yes")
        run("python", "own.py")
        run("whet", "report", "runs/own", "--json", expect='"state": "done"')


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
