"""A run that fails before its first step is explained, and does not block the corrected program."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whet
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.callbacks.event_messages import resume_message
from whet.training.callbacks.progress_line import ProgressLine, SessionPrinter

pytestmark = pytest.mark.torch


def train(run: Path, *, columns: int = 10, width: int = 32, classes: int = 2, **options: Any) -> whet.TrainResult:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 2))
    data = torch.randn(64, columns), torch.randint(0, classes, (64,))
    options = {"loss": nn.functional.cross_entropy, "measure": False, "on_event": None, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return whet.train(model, data, optimizer=optimizer, global_batch_size=16, epochs=2, run=run, **options)


@pytest.mark.parametrize("corrected", [{}, {"width": 8}], ids=["other data", "another model"])
def test_the_corrected_program_starts_anew(tmp_path: Path, corrected: dict[str, Any]) -> None:
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(run, columns=12)
    assert "traceback" in read_last(run, "end").fields
    result = train(run, **corrected)
    assert (result.state, result.step) == ("done", 8)
    message = read_last(run, "plan").get("message")
    assert message == f"{run} had ended before its first step; the run starts over"
    assert train(run, **corrected).reason == "all 2 epochs done"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_program_stopped_in_its_first_step_may_change(tmp_path: Path, error: type[BaseException]) -> None:
    def loss(micro: Any) -> torch.Tensor:
        raise error

    with pytest.raises(error):
        train(tmp_path / "run", columns=12, loss=loss)
    assert read_last(tmp_path / "run", "end").get("state") == "stopped"
    assert train(tmp_path / "run", width=8).step == 8


@pytest.mark.parametrize(("error", "state"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")])
def test_a_callback_that_fails_before_the_loop_blocks_nothing(
    tmp_path: Path, error: type[BaseException], state: str
) -> None:
    class Broken(whet.Callback):
        def on_start(self, run: Any) -> None:
            raise error("no such file")

    with pytest.raises(error):
        train(tmp_path / "run", columns=12, callbacks=[Broken()])
    assert read_last(tmp_path / "run", "end").get("state") == state
    assert train(tmp_path / "run", width=8).step == 8


def test_an_error_of_the_whole_batch_is_not_called_one_of_splitting(tmp_path: Path) -> None:
    said: list[str] = []
    handler = lambda kind, fields: said.append(str(fields.get("message")))  # noqa: E731
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(tmp_path / "run", columns=12, on_event=handler)
    assert not [message for message in said if "not split" in message]

    def needs_all(micro: Any) -> torch.Tensor:
        assert len(micro.x) == 16
        return micro.x.mean() * weight.sum()

    weight = nn.Parameter(torch.ones(2))
    whet.train(
        nn.ParameterList([weight]), (torch.randn(64, 10), torch.zeros(64)), loss=needs_all,
        optimizer=torch.optim.SGD([weight], lr=0.1), global_batch_size=16, epochs=1, measure=False, on_event=handler,
    )  # fmt: skip
    assert [message for message in said if message.startswith("the batch is not split: the loss fails with 2 of 16")]


def test_a_run_stopped_after_its_first_step_is_kept(tmp_path: Path) -> None:
    class Stop(whet.Callback):
        def after_step(self, state: Any, outcome: Any) -> whet.Action:
            return whet.Action.STOP("enough")

    assert train(tmp_path / "run", callbacks=[Stop()]).step == 1
    with pytest.raises(whet.WhetError, match="is not what the run was started with"):
        train(tmp_path / "run", width=8)
    assert train(tmp_path / "run").step == 8


def test_data_with_nan_that_were_repaired_start_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(10, 2)
    x, y = torch.randn(64, 10), torch.randint(0, 2, (64,))
    spoilt = x.clone()
    spoilt[:, 3] = torch.nan
    options = {"loss": nn.functional.cross_entropy, "epochs": 4, "run": tmp_path / "run"}
    with pytest.raises(whet.WhetError, match="x has NaN or Inf in 16 of 16 samples, in column 3") as raised:
        whet.train(model, loader(spoilt, y), optimizer=sgd(model), on_event=None, **options)
    assert "repair or drop these samples" in str(raised.value)
    model = nn.Linear(10, 2)
    assert whet.train(model, loader(x, y), optimizer=sgd(model), on_event=None, **options).state == "done"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_the_tensors_of_a_loader_is_reported_before_the_first_step(bad: float) -> None:
    model, (x, y) = nn.Linear(10, 2), (torch.randn(64, 10), torch.randint(0, 2, (64,)))
    events: list[tuple[str, Any]] = []

    def train_on(x: torch.Tensor) -> None:
        def loss(batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch[0].nan_to_num(posinf=0)), batch[1])

        events.clear()
        whet.train(model, loader(x, y), loss=loss, optimizer=sgd(model), on_event=lambda *event: events.append(event))

    train_on(x)
    assert "data" not in dict(events)
    spoilt = x.clone()
    spoilt[40:43, 3] = bad
    train_on(spoilt)
    assert events[0] == ("data", {"notes": ["x has NaN or Inf in 3 of 64 samples"]})


def test_without_a_folder_nan_in_the_data_is_named_too() -> None:
    model = nn.Linear(10, 2)
    x, y = torch.full((64, 10), torch.inf), torch.randint(0, 2, (64,))
    with pytest.raises(whet.WhetError, match=r"16 of 16 samples.*no run folder"):
        whet.train(model, loader(x, y), loss=nn.functional.cross_entropy, optimizer=sgd(model), on_event=None)


def loader(x: torch.Tensor, y: torch.Tensor, *, batch_size: int = 16) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_run_with_steps_or_foreign_files_is_kept(tmp_path: Path) -> None:
    train(tmp_path / "done")
    with pytest.raises(whet.WhetError, match="the data is not what the run was started with"):
        train(tmp_path / "done", columns=12)
    with pytest.raises(RuntimeError):
        train(tmp_path / "foreign", columns=12)
    (tmp_path / "foreign/notes.txt").write_text("mine")
    with pytest.raises(whet.WhetError, match="the data is not what the run was started with"):
        train(tmp_path / "foreign")
    assert (tmp_path / "foreign/notes.txt").read_text() == "mine"


def read_last(run: Path, kind: str) -> Any:
    return list(read_events(open_run(run), kinds=(kind,)))[-1]


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ([{"image": torch.randn(10), "label": 1}] * 32, "whet: the batch has 'image', 'label'"),
        ([(torch.randn(10), 1)] * 32, "whet: the batch has 2 fields"),
    ],
)
def test_a_missing_field_is_reported_with_those_of_the_batch(rows: Any, note: str) -> None:
    model = nn.Linear(10, 2)
    with pytest.raises((KeyError, IndexError)) as raised:
        whet.train(
            model,
            DataLoader(rows, batch_size=16),
            loss=lambda batch: model(batch["images" if isinstance(rows[0], dict) else 2]).mean(),
            optimizer=sgd(model),
            on_event=None,
        )
    assert raised.value.__notes__ == [note]


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("unpacks", [True, False])
def test_evaluation_data_without_labels_is_named(split: str, unpacks: bool) -> None:
    model, x = nn.Linear(10, 2), torch.randn(32, 10)

    def loss(batch: Any) -> torch.Tensor:
        images, labels = batch if unpacks else (batch.x, batch.y)
        return nn.functional.cross_entropy(model(images), labels)

    data = {"val": (x, torch.zeros(32, dtype=torch.long)), split: (x,)}
    with pytest.raises((AttributeError, ValueError)) as raised:
        whet.train(
            model,
            data["val"] if split == "test" else (x, torch.zeros(32, dtype=torch.long)),
            loss=loss,
            optimizer=sgd(model),
            global_batch_size=16,
            epochs=1,
            measure=False,
            on_event=None,
            **data,
        )
    (note,) = raised.value.__notes__
    assert note.startswith(f"whet: raised on {split}, not on the training data: its batches have x; give {split} ")


def test_a_failed_evaluate_function_names_its_data() -> None:
    model, x = nn.Linear(10, 2), torch.randn(32, 10)
    with (
        pytest.raises(ZeroDivisionError) as raised,
        whet.Session(model, sgd(model), x, global_batch_size=16) as session,
    ):
        session.evaluate(lambda model, batches: {"accuracy": 1 / 0}, x)
    assert raised.value.__notes__ == ["whet: raised on evaluation data, not on the training data"]


def test_a_loss_that_is_a_float_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(10, 2)
    loss = nn.functional.cross_entropy
    with pytest.raises(whet.WhetError, match=r"the loss must be a tensor\n.*float\n.*not loss.item"):
        train(tmp_path / "run", loss=lambda batch: loss(model(batch[0]), batch[1]).item())
    assert not (tmp_path / "run").exists()


# --- the failed layer ------------------------------------------------------------------------------------------------


def test_the_layer_and_its_input_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path / "run", columns=12)
    note = "whet: layer 0, Linear(in_features=10, out_features=32, bias=True), got input (16, 12) float32"
    assert raised.value.__notes__ == [note]
    end = read_last(tmp_path / "run", "end")
    assert note in end.get("reason")
    assert note in end.get("traceback")


def test_a_layer_of_a_submodule_is_named_in_an_own_loop() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3)})

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.body["conv"](images).mean((2, 3))

    net, data = Net(), (torch.randn(8, 1, 6, 6), torch.zeros(8, dtype=torch.long))
    session = whet.Session(net, torch.optim.SGD(net.parameters()), data, global_batch_size=4)
    with pytest.raises(RuntimeError) as raised:
        run_loop(session, lambda micro: nn.functional.cross_entropy(net(micro.x), micro.y))
    (note,) = raised.value.__notes__
    assert note.startswith("whet: layer body.conv, Conv2d(3, 4, ")
    assert note.endswith("got input (4, 1, 6, 6) float32")


def run_loop(session: whet.Session, loss: Any) -> None:
    with session:
        for batch in session:
            session.step(loss, batch)


def test_what_the_loss_got_is_named(tmp_path: Path) -> None:
    def loss(micro: Any) -> torch.Tensor:
        return nn.functional.mse_loss(micro.x, micro.x[:, :3])

    with pytest.raises(RuntimeError) as raised, pytest.warns(UserWarning, match="broadcast"):
        train(tmp_path / "run", loss=loss)
    assert raised.value.__notes__ == ["whet: mse_loss got input (16, 10) float32, target (16, 3) float32"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_labels_of_a_wrong_type_get_a_suggestion(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(10, 3)
    with pytest.raises(RuntimeError) as raised:
        whet.train(
            model,
            (torch.randn(32, 10), torch.zeros(32, dtype=dtype)),
            loss=lambda batch: nn.functional.cross_entropy(model(batch.x), batch.y),
            optimizer=sgd(model),
            global_batch_size=16,
            on_event=None,
        )
    (note,) = raised.value.__notes__
    assert note.endswith(f"target (16,) {str(dtype)[6:]}; class labels are int64: use y.long() for the target")


# --- a session without on_event --------------------------------------------------------------------------------------


def test_a_session_prints_its_first_skipped_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))
    x[5], x[50] = torch.nan, torch.nan
    session = whet.Session(model, sgd(model), loader(x, y, batch_size=4), run=tmp_path / "run")
    run_loop(session, nn.functional.cross_entropy)
    assert session.is_finished
    # Two steps were bad; the second is not printed.
    start, rollback, line, end = capfd.readouterr().err.splitlines()
    assert start.startswith("whet: starts, 16 steps; on_event=")
    assert rollback == "whet: rolled back to step 0: step 2: the loss is nan"
    assert end.startswith("whet: 1 epoch done at step 16; whet report ")
    assert line.startswith("whet: step 2 is skipped: the loss is nan; x has NaN or Inf in 1 of 4 samples")
    assert line.endswith('(on_event="line" prints more)')


def test_other_events_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    handler = SessionPrinter()
    handler("step", {"step": 1, "loss": 1.0})
    handler("spike", {"step": 1, "reason": "high", "samples": []})
    assert capfd.readouterr().err == ""


def test_a_session_says_how_it_starts_resumes_and_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    data = torch.randn(64, 4), torch.randint(0, 2, (64,))

    def lines(epochs: int, stop_at: int | None = None) -> list[str]:
        model = nn.Linear(4, 2)
        options: dict[str, Any] = {"epochs": epochs, "run": tmp_path / "run", "global_batch_size": 16}
        with whet.Session(model, sgd(model), data, **options) as session:
            for batch in session:
                session.step(nn.functional.cross_entropy, batch)
                if session.due("evaluate"):
                    session.log(accuracy=0.5, top5=0.9)
                if session.progress.step == stop_at:
                    break
        return capfd.readouterr().err.splitlines()

    start, goal, stopped = lines(3, stop_at=6)
    assert start == 'whet: starts, 12 steps; on_event="line" shows the plan and a progress line'
    assert goal == 'whet: no goal, so the best weights are not kept; goal="accuracy" keeps them'
    assert stopped.startswith("whet: ")
    assert stopped.endswith("at step 6; the same program resumes")
    resumed, _, end = lines(3)
    assert resumed.startswith("whet: resumes from step 6, session state restored exactly")
    assert end.startswith("whet: all 3 epochs done at step 12")
    (again,) = lines(3)
    assert again == "whet: all 3 epochs done at step 12"


@pytest.mark.parametrize("on_event", [None, "line"])
def test_a_stop_without_a_run_folder_promises_no_resume(on_event: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model, data = nn.Linear(4, 2), (torch.rand(16, 4), torch.zeros(16, dtype=torch.int64))
    with whet.Session(model, sgd(model), data, global_batch_size=4, on_event=on_event) as session:
        for batch in session:
            session.step(nn.functional.cross_entropy, batch)
            break
    last = capfd.readouterr().err.splitlines()[-1]
    assert "at step 1" in last
    assert "resumes" not in last


def test_a_resume_before_the_first_checkpoint_starts_again() -> None:
    fields = {"step": 0, "exactness": "bit-exact"}
    assert resume_message(fields, total=9) == "starts again from step 0: it ended before its first checkpoint"
    damaged = resume_message({**fields, "rejected": ["step-000000004: too short"]}, total=9)
    assert damaged == "starts again from step 0: no later checkpoint can be read"
    assert resume_message({**fields, "step": 3}, total=9) == "resumes from step 3, bit-exact"


# --- loss spikes -----------------------------------------------------------------------------------------------------


def test_many_loss_spikes_are_two_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        line = ProgressLine(stream=stream)
        for step in range(100, 133):
            line("spike", {"step": step, "reason": "the loss is 9", "samples": [1]})
        line("end", {"step": 200, "state": "done", "reason": "1 epoch done"})
    assert (tmp_path / "log").read_text().splitlines() == [
        "train: step 100: the loss is 9 (samples 1 ...)",
        "train: 32 more loss spikes since then",
    ]
