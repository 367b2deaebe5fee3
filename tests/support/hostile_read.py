"""One hostile file at one entry point of whet, in a process that exits when anything is executed: `main([JSON])`.

Exit codes: whet's own, or 99 if the audit hook detected a violation.
"""

import importlib
import json
import os
import resource
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

WHET = str(Path(__file__).parent.parent.parent / "src")
TESTS = str(Path(__file__).parent.parent)
LIBRARIES = str(Path(pytest.__file__).parent.parent)
"""The folder of the installed packages, which a .pth file can place outside sys.prefix."""
CAUGHT = 99

PROGRAMS = ("nvidia-smi", "sysctl", "sw_vers", "system_profiler", "ioreg", "pmset", "lscpu", "caffeinate", "uname")
"""Programs that whet and Python's platform module run to describe the machine."""

SAFE_GLOBALS = ("torch", "collections", "numpy", "_codecs")
"""Where the globals of plain weights come from; whatever torch's own reader resolves beyond them is a finding."""

FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "socket.connect", "webbrowser.open")


def watch(findings: Path, *, allowed_code: tuple[str, ...]) -> None:
    """From now on, executing code other than whet's, Python's or a library's ends this process."""
    homes = (WHET, TESTS, LIBRARIES, sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), "<", *allowed_code)

    def caught(what: str) -> None:
        descriptor = os.open(findings, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{what}\n".encode())
        os._exit(CAUGHT)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            caught(f"{event} {arguments!r:.200}")
        elif event == "subprocess.Popen":
            words = [str(word) for word in ([arguments[1]] if isinstance(arguments[1], str) else arguments[1])]
            if Path(words[0]).name not in PROGRAMS and words[:2] != [sys.executable, "-P"]:
                caught(f"{event} {words!r:.200}")
        elif event == "pickle.find_class" and not str(arguments[0]).startswith(SAFE_GLOBALS):
            caught(f"{event} {arguments!r:.200}")
        elif event == "exec" and hasattr(arguments[0], "co_filename"):
            if not arguments[0].co_filename.startswith(homes):
                caught(f"{event} {arguments[0].co_filename}")
        elif event == "compile" and isinstance(arguments[1], str) and not arguments[1].startswith(homes):
            caught(f"{event} {arguments[1]}")

    sys.addaudithook(hook)


def main(arguments: list[str]) -> int:
    options: dict[str, Any] = json.loads(arguments[0])
    os.chdir(options["path"] if options["is_inside"] else options["folder"])
    if options["is_inside"]:
        forget()
    unpack_here()
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    limit(seconds=options["cpu_seconds"], gigabytes=2)
    watch(Path(options["findings"]), allowed_code=(options["recipe"],))
    plant(options["plant"])
    before = resource.getrusage(resource.RUSAGE_SELF)
    code = DOORS[options["door"]](options)
    used = resource.getrusage(resource.RUSAGE_SELF)
    logged = {
        "cpu": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "rss": used.ru_maxrss - before.ru_maxrss,
    }
    Path(options["logged"]).write_text(json.dumps(logged))
    return code


def forget() -> None:
    """Import modules again that may be shadowed: the parent has already imported whet's command line."""
    for name in [name for name in sys.modules if name.startswith(("typer", "yaml", "whet.cli"))]:
        del sys.modules[name]


def limit(*, seconds: int, gigabytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + gigabytes * 1024**3,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def unpack_here() -> None:
    """The process of `whet import` as a fork of this one, with torch imported and the audit hook installed."""
    from whet.checkpoint import importer, unpickle

    def run(file: Any, words: list[str], *, seconds: int) -> tuple[int, bytes]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(file.fileno(), 0)
            os.dup2(writing, 1)
            code = 70
            try:
                code = unpickle.main(words)
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            output = answer.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == CAUGHT:
            os._exit(CAUGHT)
        return code, output

    importer.run_unpickle_process = run


def plant(fault: str | None) -> None:
    """A reader that whet must not have; the harness must detect it."""
    import pickle

    import torch

    from whet.checkpoint import store, unpickle

    if fault == "pickle.load":
        # The fourth of the pickles in a legacy file is the content.
        unpickle._load = lambda file: [pickle.load(file) for _ in range(4)]
    elif fault == "torch.load":
        unpickle._load = lambda file: torch.load(file, weights_only=False)
    elif fault == "checkpoint":
        read = store.read_verified
        store.read_verified = lambda path, expected=None: read(path)
        store.check_sizes = lambda path: store.read_manifest(path, read(path / "manifest.json"))
        store.decode_tensors = pickle.loads
    elif fault == "cwd":
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop("yaml", None)
        importlib.import_module("yaml")


def cli(*words: str) -> int:
    from whet.cli.main import run

    return run(list(words))


def session(options: dict[str, Any], **more: Any) -> int:
    import torch

    import whet
    from whet.cli import output

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    x, y = torch.randn(16, 2), torch.zeros(16).long()
    choice = whet.OptimizerChoice(name="adamw", lr=1e-2)
    overrides = {"threads": 1, "checkpoint_steps": 2}
    try:
        with whet.Session(
            model,
            choice,
            (x, y),
            global_batch_size=4,
            max_steps=options["steps"],
            epochs=9,
            device="cpu",
            overrides=overrides,
            **more,
        ) as made:
            for batch in made:
                made.step(lambda micro: torch.nn.functional.cross_entropy(model(micro.x), micro.y), batch)
    except whet.WhetError as error:
        output.error(error)
        return error.exit_code
    return 0


PLAN = ("--machine", "m2-air-8gb")
HERE = ("checkpoint_steps=2", "--max-restarts", "0", "--device", "cpu")

DOORS: dict[str, Any] = {
    "import": lambda o: cli("import", o["path"], "--out", "imported"),
    "init_from": lambda o: session(o, init_from=o["path"]),
    "session": lambda o: session(o, run=o["path"]),
    "train": lambda o: cli("train", o["recipe"], f"max_steps={o['steps']}", *HERE, "--run", o["path"]),
    "predict": lambda o: cli("predict", o["path"], "a text"),
    "report": lambda o: cli("report", o["path"]),
    "runs": lambda o: cli("runs", str(Path(o["path"]).parent)),
    "plan": lambda o: cli("plan", o["path"]),
    "machine": lambda o: cli("plan", "text", "--machine", o["path"]),
    "config": lambda o: cli("plan", "text", "--config", o["path"], *PLAN),
    "train config": lambda o: cli("train", o["recipe"], *HERE, "--config", o["path"], "--run", "never"),
}
