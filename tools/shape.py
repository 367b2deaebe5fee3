"""Print the shape of a source tree: sizes, names used twice, small modules, and the files of a training step.

    python tools/shape.py
    python tools/shape.py --src OTHER/src/whet --names --modules --step

Counts are taken from the syntax tree. `--step` trains a tiny model in a custom loop, records every call with
`sys.setprofile` and counts the files of the package that a steady step enters.
"""

import argparse
import ast
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

SMALL_LINES = 90
"""A module under this size with one importer may belong into its importer."""
WARM_UP_STEPS, PROFILED_STEPS = 20, 20

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def num_filled_lines(self) -> int:
        return sum(bool(line.strip()) for line in self.text.splitlines())

    @property
    def num_comment_lines(self) -> int:
        """Lines that hold a comment, alone or behind code."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})

    def imports(self, known: Container[str]) -> set[str]:
        """The known modules that this one imports, at any place. `from a import b` means a.b where that is a module."""
        result: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                result |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                result |= {name if name in known else node.module for name in names.values()}
        return {name for name in result if name in known and name != self.name}

    def definitions(self) -> Iterator[tuple[str, Definition]]:
        """Functions and classes with their dotted names, nested ones included."""

        def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, Definition):
                    yield f"{prefix}{child.name}", child
                    yield from walk(child, f"{prefix}{child.name}.")
                else:
                    yield from walk(child, prefix)

        return walk(self.tree, "")


class Tree:
    """All modules of a package."""

    def __init__(self, source: Path) -> None:
        self.source = source.resolve()
        files = sorted(self.source.rglob("*.py"))
        self.modules = {name: Module(name, file, file.read_text()) for file in files for name in [self._name(file)]}

    def _name(self, file: Path) -> str:
        parts = file.relative_to(self.source.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def classes(self) -> dict[str, list[str]]:
        """For each class name, the modules that define one."""
        result: dict[str, list[str]] = defaultdict(list)
        for module in self.modules.values():
            for _, node in module.definitions():
                if isinstance(node, ast.ClassDef):
                    result[node.name].append(module.name)
        return result

    def importers(self) -> dict[str, set[str]]:
        """For each module that is not a package, the modules that import it."""
        result: dict[str, set[str]] = {name: set() for name, m in self.modules.items() if m.path.name != "__init__.py"}
        for module in self.modules.values():
            for name in module.imports(self.modules) & result.keys():
                result[name].add(module.name)
        return result

    def longest(self, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> list[tuple[int, str]]:
        """Functions or classes with their number of lines, longest first."""
        lengths = [
            ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.name}.{name}")
            for module in self.modules.values()
            for name, node in module.definitions()
            if isinstance(node, kind)
        ]
        return sorted(lengths, reverse=True)

    def session(self) -> tuple[Module, ast.ClassDef] | None:
        """The class Session and its module."""
        for module in self.modules.values():
            for name, node in module.definitions():
                if name == "Session" and isinstance(node, ast.ClassDef):
                    return module, node
        return None


def print_shape(tree: Tree, *, top: int, shows_names: bool, shows_modules: bool) -> None:
    """Print the table of a source tree."""
    modules = list(tree.modules.values())
    lines = [module.num_lines for module in modules]
    shared = {name: places for name, places in tree.classes().items() if len(places) > 1}
    alone = {name: next(iter(users)) for name, users in tree.importers().items() if len(users) == 1}
    small = {name for name in alone if tree.modules[name].num_lines < SMALL_LINES}
    beside = {name for name in small if name.rpartition(".")[0] == package_of(tree, alone[name])}
    comments = sum(module.num_comment_lines for module in modules)
    row("files", f"{len(modules)}")
    row("thousand lines", f"{sum(lines) / 1000:.1f}")
    row("median lines of a file", f"{statistics.median(lines):.0f}")
    row("class names used more than once", f"{len(shared)} ({sum(map(len, shared.values()))} classes)")
    filled = sum(module.num_filled_lines for module in modules)
    row("lines with a comment", f"{100 * comments / filled:.1f} % of those that are not blank")
    row("modules with one importer", f"{len(alone)}")
    row(f"  of these under {SMALL_LINES} lines", f"{len(small)}, {len(beside)} of them beside their importer")
    if (result := tree.session()) is not None:
        module, node = result
        methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = [name for name in methods if not name.startswith("_")]
        imported = module.imports(tree.modules)
        row(
            "Session", f"{(node.end_lineno or 0) - node.lineno + 1} lines, {len(methods)} methods, {len(public)} public"
        )
        row("  its module", f"{module.name}, {module.num_lines} lines, imports {len(imported)} of our modules")
    for title, kind in (("functions", (ast.FunctionDef, ast.AsyncFunctionDef)), ("classes", ast.ClassDef)):
        print(f"\nlongest {title}")
        for length, name in tree.longest(kind)[:top]:
            print(f"  {length:5}  {name}")
    if shows_names and shared:
        print("\nclass names used more than once")
        for name, places in sorted(shared.items(), key=lambda item: (-len(item[1]), item[0])):
            print(f"  {name}: {', '.join(places)}")
    if shows_modules:
        print(f"\nmodules under {SMALL_LINES} lines with one importer")
        for name in sorted(small):
            print(f"  {tree.modules[name].num_lines:5}  {name} <- {alone[name]}")


def package_of(tree: Tree, name: str) -> str:
    """The package that a module is in; a package is in itself."""
    return name if tree.modules[name].path.name == "__init__.py" else name.rpartition(".")[0]


def row(title: str, value: str) -> None:
    print(f"{title:34} {value}")


class Profile:
    """Notes calls into files of a package, step by step."""

    def __init__(self, package: Path) -> None:
        self._prefix = str(package) + os.sep
        self._files: list[str] = []
        self.steps: list[list[str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(self._prefix):
            self._files.append(file)

    def end_step(self) -> None:
        self.steps.append(self._files)
        self._files = []


def profile_steps(package: Path) -> list[list[str]]:
    """Train a tiny model and return for each steady step the files that it was in, in order."""
    sys.path.insert(0, str(package.parent))
    import torch

    import whet

    torch.set_num_threads(1)
    x = torch.randn(4_000, 10, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].sum(1, keepdim=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    profile, first, last = Profile(package), WARM_UP_STEPS, WARM_UP_STEPS + PROFILED_STEPS

    def loss(micro: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(micro.x), micro.y)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        session = whet.Session(model, optimizer, (x, y), global_batch_size=50, epochs=1, run=f"{folder}/run")
        with session:
            for number, batch in enumerate(session):
                if number > first:
                    profile.end_step()
                if number == first:
                    sys.setprofile(profile)
                if number == last:
                    sys.setprofile(None)
                session.step(loss, batch)
                if number > last:
                    break
    return profile.steps[: last - first]


def print_step(package: Path) -> None:
    """Print the median number of files and of switches between files of a step."""
    steps = profile_steps(package)
    switches = [sum(a != b for a, b in pairwise(step)) for step in steps]
    row("files a steady step enters", f"{statistics.median(len(set(step)) for step in steps):.0f}")
    row(f"  any of {len(steps)} steps", f"{len({file for step in steps for file in step})}")
    row("  calls into the package", f"{statistics.median(map(len, steps)):.0f}")
    row("  switches between files", f"{statistics.median(switches):.0f}")
    entered = Counter(file for step in steps for file in set(step))
    print("\nfiles of a steady step, and the share of steps that enter them")
    for file, count in sorted(entered.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {100 * count / len(steps):4.0f} %  {Path(file).relative_to(package)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=Path(__file__).resolve().parent.parent / "src" / "whet")
    parser.add_argument("--top", type=int, default=10, help="how many of the longest functions and classes")
    parser.add_argument("--names", action="store_true", help="list class names that are used more than once")
    parser.add_argument("--modules", action="store_true", help="list small modules with one importer")
    parser.add_argument("--step", action="store_true", help="profile a training step (needs torch)")
    parser.add_argument("--only-step", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_step:
        print_step(given.src.resolve())
        return
    print_shape(Tree(given.src), top=given.top, shows_names=given.names, shows_modules=given.modules)
    if given.step:
        print(flush=True)
        # In a separate process, because the package under test may not be the installed one.
        subprocess.run([sys.executable, __file__, "--src", given.src, "--only-step"], check=True)


if __name__ == "__main__":
    main()
