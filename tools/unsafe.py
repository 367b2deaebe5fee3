"""Refuses calls that run what a file says: `python tools/unsafe.py FILE|FOLDER...` prints each and exits with 1.

A list of names cannot find every way; it finds the ones that people write by habit.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

UNPACKER = "checkpoint/unpickle.py"
"""The one file that reads a pickle, with weights_only=True spelled out: the default can be changed from outside."""

BANNED = {
    **dict.fromkeys(("eval", "exec", "os.system", "os.popen"), "runs text as a program"),
    **dict.fromkeys(("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads"), "runs what the file says"),
    **dict.fromkeys(("dill.load", "cloudpickle.load", "joblib.load", "shelve.open"), "unpickles"),
    **dict.fromkeys(
        ("pandas.read_pickle", "torch.jit.load", "torch.hub.load", "torch.package"), "runs code of the file"
    ),
    **dict.fromkeys(
        ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"),
        "makes any object; yaml.safe_load does not",
    ),
    **dict.fromkeys(
        ("torch.distributed.checkpoint.load", "torch.distributed.checkpoint.load_state_dict"),
        "unpickles the folder's .metadata",
    ),
}
SWITCHES = ("shell", "trust_remote_code", "allow_pickle")


def findings(path: Path, text: str) -> Iterator[str]:
    """What is wrong in a file, a line each."""
    tree = ast.parse(text)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for what in wrong(node, names, path):
                yield f"{path}:{node.lineno}: {what}"


def wrong(call: ast.Call, names: dict[str, str], path: Path) -> Iterator[str]:
    """What is wrong with a call."""
    name = dotted(call.func, names)
    if name in BANNED:
        yield f"{name} {BANNED[name]}"
    if name in ("torch.load", "torch.serialization.load"):
        if "whet" in path.parts and not path.as_posix().endswith(UNPACKER):
            yield "torch.load belongs in whet/checkpoint/unpickle.py alone"
        if not any(word.arg == "weights_only" and is_true(word.value) for word in call.keywords):
            yield "torch.load without weights_only=True, literally"
    for word in call.keywords:
        if word.arg in SWITCHES and not (isinstance(word.value, ast.Constant) and not word.value.value):
            yield f"{word.arg} other than False"


def imported(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for."""
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


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of what is called; empty where it has none."""
    if isinstance(node, ast.Attribute):
        above = dotted(node.value, names)
        return f"{above}.{node.attr}" if above else ""
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def main(words: list[str]) -> int:
    files = [
        file for word in words for file in (sorted(Path(word).rglob("*.py")) if Path(word).is_dir() else [Path(word)])
    ]
    found = [line for file in files for line in findings(file, file.read_text(encoding="utf-8"))]
    print("\n".join(found) or f"{len(files)} files: no call that runs what a file says")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
