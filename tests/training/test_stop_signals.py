"""A stop request is acknowledged immediately; a second one stops the run with the exit code of the signal."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from whet.base.process import TerminatedError
from whet.cli import search
from whet.hpo import trial_process
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

SAID = {
    signal.SIGINT: "stopping after this step; a second Ctrl-C stops without saving",
    signal.SIGTERM: "SIGTERM: stopping after this step; a second one stops without saving",
}
Logged = list[tuple[str, dict[str, Any]]]


def train(
    run: Path, *, on_event: Callable[[str, dict[str, Any]], None], in_loss: Callable[[int], None], **options: Any
):
    torch.manual_seed(0)
    model = convnet()
    calls = 0

    def loss(micro: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        in_loss(calls)
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    return whet.train(
        model,
        images(64, seed=0),
        loss=loss,
        optimizer=whet.OptimizerChoice(lr=1e-3),
        global_batch_size=16,
        epochs=options.pop("epochs", 3),
        measure=False,
        run=run,
        on_event=on_event,
        device="cpu",
        overrides={"threads": 1, "micro_batch": 16, **options.pop("overrides", {})},
        **options,
    )


def words(logged: Logged) -> list[str]:
    return [fields["message"] for kind, fields in logged if kind == "stopping"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_answered_at_once(tmp_path: Path, number: signal.Signals) -> None:
    logged: Logged = []
    at_once: list[str] = []

    def ask(call: int) -> None:
        if call == 3:
            os.kill(os.getpid(), number)
            at_once.extend(words(logged))

    result = train(tmp_path / "run", on_event=lambda kind, fields: logged.append((kind, fields)), in_loss=ask)
    assert (result.state, result.step, result.exit_code) == ("stopped", 3, 128 + number)
    assert at_once == [SAID[number]], "reported in the middle of the step"
    assert words(logged) == at_once, "once"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_a_signal_while_a_compiled_model_is_compared_is_answered_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    # The result of the comparison is cached, and a second run of this test would not compare.
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    # Compiles instantly: the comparison is what the signal interrupts.
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    logged: Logged = []
    heard_at: list[str] = []

    def ask(call: int) -> None:
        if call == 1:
            os.kill(os.getpid(), signal.SIGINT)
            heard_at.extend(kind for kind, _ in logged)

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        logged.append((kind, fields))

    result = train(tmp_path / "run", on_event=on_event, in_loss=ask, overrides={"compile": "on"})
    assert (result.step, result.exit_code) == (1, 130)
    assert heard_at[-1] == "stopping"
    compared = [str(fields.get("message")) for kind, fields in logged if kind == "plan"]
    # The loss counts its calls, so only the model is compiled.
    assert any(line.startswith("compiled without your loss function") for line in compared)
    assert not any(str(e.get("message")).startswith("compiled") for k, e in logged[: len(heard_at)] if k == "plan")


def test_a_signal_in_the_middle_of_showing_waits_for_its_end(tmp_path: Path) -> None:
    logged: Logged = []
    depth = 0

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        nonlocal depth
        depth += 1
        assert depth == 1, "one message at a time"
        if kind == "eval":
            os.kill(os.getpid(), signal.SIGTERM)
            # Here the handler runs.
            time.sleep(0.01)
        logged.append((kind, fields))
        depth -= 1

    options: dict[str, Any] = {"evaluate": lambda _model, _micros: {"a": 1.0}, "val": images(8, seed=1)}
    result = train(tmp_path / "run", on_event=on_event, in_loss=lambda _call: None, eval_every=2, **options)
    assert result.step == 2
    kinds = [kind for kind, _ in logged]
    assert kinds[kinds.index("eval") + 1] == "stopping"
    assert words(logged) == [SAID[signal.SIGTERM]]


def test_a_stream_that_refuses_a_write_in_the_middle_of_another_is_tried_again(tmp_path: Path) -> None:
    logged: Logged = []
    refusals = 0

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        nonlocal refusals
        if kind == "stopping" and not refusals:
            refusals += 1
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")
        logged.append((kind, fields))

    def ask(call: int) -> None:
        if call == 2:
            os.kill(os.getpid(), signal.SIGINT)

    train(tmp_path / "run", on_event=on_event, in_loss=ask)
    assert refusals == 1
    assert words(logged) == [SAID[signal.SIGINT]]
    assert logged[-1][0] == "end", "and all else is shown"
    warnings = [event for event in read_events(open_run(tmp_path / "run")) if event.kind == "warning"]
    # The counter of the loss is named as state that checkpoints do not hold; nothing else is.
    assert ["`calls` of the loss" in event.get("reason") for event in warnings] == [True]


def test_after_the_last_step_nothing_is_promised_of_one(tmp_path: Path) -> None:
    logged: Logged = []

    def evaluate(_model: nn.Module, _micros: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return {"a": 1.0}

    result = train(
        tmp_path / "run",
        on_event=lambda kind, fields: logged.append((kind, fields)),
        in_loss=lambda _call: None,
        epochs=1,
        evaluate=evaluate,
        val=images(8, seed=1),
    )
    assert (result.state, result.exit_code) == ("done", 0)
    assert words(logged) == ["stopping once all is evaluated and saved; a second Ctrl-C stops without saving"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError)])
def test_a_second_one_stops_at_once(tmp_path: Path, number: signal.Signals, error: type[BaseException]) -> None:
    def ask(call: int) -> None:
        if call == 2:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    with pytest.raises(error):
        train(tmp_path / "run", on_event=lambda _kind, _fields: None, in_loss=ask)
    (end,) = (event for event in read_events(open_run(tmp_path / "run")) if event.kind == "end")
    assert (end.get("state"), end.step) == ("stopped", 1)


@pytest.mark.parametrize(
    ("number", "num", "code", "switches"),
    [
        pytest.param(signal.SIGTERM, 2, 143, (), marks=pytest.mark.slow),
        (signal.SIGINT, 2, 130, ()),
        pytest.param(signal.SIGTERM, 1, 143, (), marks=pytest.mark.slow),
        (signal.SIGTERM, 1, 143, ("--quiet",)),
    ],
)
def test_the_command_ends_with_the_code_of_the_signal(
    warm_whet: Any, tmp_path: Path, number: signal.Signals, num: int, code: int, switches: tuple[str, ...]
) -> None:
    asks = f"        import os\n        [os.kill(os.getpid(), {int(number)}) for _ in range({num})]\n"
    starter = resources.files("whet.recipes").joinpath("starter.py").read_text()
    head, loss, rest = starter.partition("        return nn.functional.cross_entropy(")
    (tmp_path / "mine.py").write_text(head + asks + loss + rest)
    words = ("train", "mine.py", "--run", "run", "--device", "cpu", "--no-measure", "--max-restarts", "0")
    ended = warm_whet(*words, *switches, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    reported = f"mine: {SAID[number]}\n"
    assert ended.stderr.count(reported) == (0 if switches else 1)
    assert "stopping" not in ended.stdout, "results only: a program may read it"
    assert "Traceback" not in ended.stderr
    assert "error:" not in ended.stderr


def test_a_script_that_is_terminated_twice_exits_with_the_signals_code(warm_python: Any, tmp_path: Path) -> None:
    program = """
import os, signal, torch, whet
model = torch.nn.Linear(2, 2)
def loss(micro):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.ones(8, 2), torch.ones(8, dtype=torch.long)
whet.train(model, data, loss=loss, optimizer=sgd, global_batch_size=4, device="cpu", measure=False)
"""
    ended = warm_python.run("-c", program, cwd=tmp_path)
    assert ended.returncode == 143, ended.stderr
    assert SAID[signal.SIGTERM] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_search_answers_the_first_signal_and_a_second_one_stops_it(capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    with search._stop_on_signals(stop) as heard:
        signal.raise_signal(signal.SIGTERM)
        assert (heard, stop.is_set()) == ([signal.SIGTERM], True)
        reported = capsys.readouterr()
        words = "SIGTERM: stopping once the running trials are saved; a second one stops without saving\n"
        assert reported.err == words
        assert not reported.out
        with pytest.raises(TerminatedError) as second:
            signal.raise_signal(signal.SIGTERM)
    assert second.value.code == 143


def test_a_trial_that_is_terminated_twice_has_not_failed() -> None:
    messages: list[Any] = []

    class Channel:
        def send(self, message: dict[str, Any]) -> None:
            messages.append(message)

    assert trial_process._report(TerminatedError(signal.SIGTERM), Channel()) == 143
    assert not messages
