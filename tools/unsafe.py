"""Find calls that may execute code from data: `python tools/unsafe.py FILE|FOLDER...` lists them, exit code 1.

A list of names cannot catch everything; it catches the calls that people write by habit.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

UNPICKLER = "checkpoint/unpickle.py"
"""The only file that may read a pickle, with an explicit weights_only=True: the environment can change the default."""

SHIPPER = "training/shipped_bench.py"
"""The only file that may execute a pickle: one that the parent process sends through a pipe (docs/choices/0020)."""

BANNED = {
    **dict.fromkeys(("eval", "exec", "os.system", "os.popen"), "executes text as code"),
    **dict.fromkeys(
        ("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads"), "executes code from the file"
    ),
    **dict.fromkeys(("dill.load", "cloudpickle.load", "cloudpickle.loads", "joblib.load", "shelve.open"), "unpickles"),
    **dict.fromkeys(
        ("pandas.read_pickle", "torch.jit.load", "torch.hub.load", "torch.package"), "executes code from the file"
    ),
    **dict.fromkeys(
        ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"),
        "creates arbitrary objects; use yaml.safe_load",
    ),
    **dict.fromkeys(
        ("torch.distributed.checkpoint.load", "torch.distributed.checkpoint.load_state_dict"),
        "unpickles the folder's .metadata",
    ),
}
SWITCHES = ("shell", "trust_remote_code", "allow_pickle")


def findings(path: Path, text: str) -> Iterator[str]:
    """Yield one line for each unsafe call of a file."""
    tree = ast.parse(text)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for what in problems(node, names, path):
                yield f"{path}:{node.lineno}: {what}"


def problems(call: ast.Call, names: dict[str, str], path: Path) -> Iterator[str]:
    """Yield the problems of a call."""
    name = full_name(call.func, names)
    if name in BANNED and not (name == "pickle.load" and path.as_posix().endswith(f"whet/{SHIPPER}")):
        yield f"{name} {BANNED[name]}"
    if name in ("torch.load", "torch.serialization.load"):
        if "whet" in path.parts and not path.as_posix().endswith(UNPICKLER):
            yield "torch.load is allowed in whet/checkpoint/unpickle.py only"
        if not any(word.arg == "weights_only" and is_true(word.value) for word in call.keywords):
            yield "torch.load without an explicit weights_only=True"
    for word in call.keywords:
        if word.arg in SWITCHES and not (isinstance(word.value, ast.Constant) and not word.value.value):
            yield f"{word.arg} is not False"


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full name behind each imported name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of an expression; empty if it is not a dotted name."""
    if isinstance(node, ast.Attribute):
        parent = full_name(node.value, names)
        return f"{parent}.{node.attr}" if parent else ""
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def main(words: list[str]) -> int:
    files = [
        file for word in words for file in (sorted(Path(word).rglob("*.py")) if Path(word).is_dir() else [Path(word)])
    ]
    lines = [line for file in files for line in findings(file, file.read_text(encoding="utf-8"))]
    print("\n".join(lines) or f"{len(files)} files without unsafe calls")
    return 1 if lines or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
