"""The server, the training and the hostile or damaged runs of the browser tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from homes import new_home
from hostile_names import create_renamed_run
from whet.report.run_status import read_status
from whet.run.events import EventLog
from whet.run.folder import EVENTS_FILE, create_run

EVIL = '<img src=x onerror="window.owned=1">'
EVIL_NAME = f"evil {EVIL} \u202e\x1b[2J"
RECORDED_PLAN = Path(__file__).parent / "recordings" / "browser" / "measured_plan.json"


def start(*words: str, folder: Path, **options: object) -> subprocess.Popen[str]:
    """Start `whet WORDS` as a separate process."""
    environment = {**os.environ, "WHET_HOME": str(new_home(folder / "home"))}
    command = [sys.executable, "-m", "whet", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **options)  # type: ignore[call-overload]


def start_server(folder: Path, *, port: int = 0, watched: str = "runs") -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start `whet watch` for a folder of runs, or one run, and return its JSON description."""
    words = ("watch", watched, "--no-browser", "--json", "--port", str(port))
    with (folder / "server.log").open("w") as log:
        server = start(*words, folder=folder, stdout=subprocess.PIPE, stderr=log)
    assert server.stdout is not None
    with server.stdout:
        logged = server.stdout.readline()
    if not logged:
        raise AssertionError(f"the server ended with {server.wait()}: {(folder / 'server.log').read_text()}")
    return server, json.loads(logged)


class Training:
    """Start the text recipe in a process group that can be stopped."""

    def __init__(self, folder: Path, *words: str, run: str) -> None:
        self._log = folder / f"{run}.log"
        self.run = folder / "runs" / run
        with self._log.open("w") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            self._process = start("train", "text", *words, "--run", f"runs/{run}", folder=folder, **options)

    def hold(self) -> None:
        """Stop it after its first steps, so that it cannot end while the page is tested."""
        events = self.run / EVENTS_FILE
        while not (events.exists() and b'"kind":"step"' in events.read_bytes()):
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        os.killpg(self._process.pid, signal.SIGSTOP)

    def kill_once(self, *, at: int) -> None:
        """Kill the process that trains after a step. Its parent, `whet train`, starts it again."""
        while (read_status(self.run).step if self.run.exists() else 0) < at:
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.2)
        os.kill(json.loads((self.run / "lock").read_text())["pid"], signal.SIGKILL)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def wait(self) -> Path:
        """Return the finished run."""
        if self._process.poll() is None:
            # A test that failed meanwhile may have left it stopped.
            self.go_on()
        assert self._process.wait(timeout=600) == 0, self._log.read_text()
        return self.run

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def make_evil(runs: Path) -> Path:
    """A run with markup and control characters in every text field."""
    run = create_renamed_run(
        runs / EVIL_NAME,
        recipe=EVIL,
        config={EVIL: EVIL},
        plan={"settings": {EVIL: {"value": EVIL, "reason": EVIL, "source": EVIL, "evidence": {"rule": EVIL}}}},
        machine={"chip": EVIL},
        versions={EVIL: EVIL},
        command=["whet", "train", EVIL],
    )
    script = "</script><script>window.owned=1</script>"
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=50, goal=EVIL, mode="max")
        for step in range(1, 41):
            log.append("step", step=step, epoch=0, samples=step, loss=1 / step, **{EVIL: 1.0}, seconds={EVIL: 0.1})
        log.append("eval", step=40, **{EVIL: 0.5, "samples": [{"input": script, "expected": EVIL, "predicted": EVIL}]})
        log.append("warning", step=40, reason=f"{script} \x1b[31m \u2028 {EVIL}", again=EVIL)
        log.append("end", step=40, state="failed", reason=script)
    return run.path


def make_torn(runs: Path) -> Path:
    """A run whose process died in the middle of a line."""
    run = create_run(runs / "torn", recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"])
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=100)
        for step in range(1, 31):
            log.append("step", step=step, epoch=0, samples=step, loss=1 / step)
    with (run.path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","time":1794731600.5,"step":31,"epoch":0,"samples":31,"lo')
    return run.path


def make_sibling(run: Path) -> Path:
    """A copy of a finished run with another learning rate and the recorded plan of a measured run."""
    draft = run.with_name(".text-002")
    shutil.copytree(run, draft)
    config = json.loads((run / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "lr": 0.0005}))
    shutil.copy(RECORDED_PLAN, draft / "plan.json")
    return draft.rename(run.with_name("text-002"))
