"""`whet.train`: spelled-out keywords, suggestions for unknown ones, and recipes by name."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from paths import ROOT, Run
from whet.base.errors import UsageError
from whet.config.options import SessionOptions
from whet.training.keywords import OTHER_NAMES, PUBLIC_NAMES
from whet.training.loop import TrainResult

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("function", "missing"), [(whet.train, set()), (whet.Session, {"lr_batch"}), (whet.tune, set(PUBLIC_NAMES))]
)
def test_every_keyword_is_in_the_signature_and_the_docstring(function, missing: set[str]) -> None:
    parameters = inspect.signature(function).parameters
    training = set(SessionOptions.model_fields)
    expected = training | (PUBLIC_NAMES - missing)
    assert expected <= set(parameters)
    for name in expected - {"on_event"}:
        assert f"    {name}: " in function.__doc__, name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation is not inspect.Parameter.empty
    for name, field in SessionOptions.model_fields.items():
        assert field.is_required() or parameters[name].default == field.default


@pytest.mark.slow
def test_an_editor_completes_the_keywords() -> None:
    """jedi reads the source, so it sees neither overloads nor `__wrapped__` as inspect does."""
    jedi = pytest.importorskip("jedi")
    (train,) = jedi.Script("import whet\nwhet.train(").get_signatures()
    offered = {parameter.name for parameter in train.params}
    assert {"model", "data", "loss", "optimizer", "epochs", "val", "run", "callbacks", "overrides"} <= offered
    completed = jedi.Script("import whet\nwhet.Session(model, optimizer, data, ep").complete()
    assert {each.name_with_symbols for each in completed} == {"epochs=", "epochs_per_session="}


def test_a_new_option_appears_in_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import keywords
    from pydantic import Field

    class MoreOptions(SessionOptions):
        planted: list[str] | None = Field(None, description="a planted option")

    target = keywords.TARGETS[0]
    assert "planted" not in keywords.generate(target)
    monkeypatch.setattr(keywords, "SessionOptions", MoreOptions)
    text = keywords.generate(target)
    assert "        planted: list[str] | None = None,\n" in text
    assert "        planted: A planted option.\n" in text


@pytest.mark.parametrize(
    ("keyword", "value", "hint"),
    [
        ("epohcs", 3, "did you mean 'epochs'"),
        ("calbacks", (), "did you mean 'callbacks'"),
        ("learning_rate", 1e-3, "the optimizer has the learning rate"),
        ("batch_size", 3, "global_batch_size"),
        ("micro_batch", 8, "overrides={'micro_batch': 8}"),
        ("prefetch_factor", 2, "the plan decides how data is loaded"),
        ("metrics", {}, 'evaluate=f, where f(model, batches) returns {"accuracy": 0.9}; goal="accuracy"'),
        ("zzz", 1, "help(whet.train)"),
    ],
)
def test_an_unknown_keyword_is_explained(tmp_path: Path, keyword: str, value: object, hint: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {"global_batch_size": 8, "run": tmp_path / "run", keyword: value}
    calls = [
        lambda: whet.train(model, torch.rand(8, 2), loss=model, optimizer=optimizer, **more),
        lambda: whet.Session(model, optimizer, torch.rand(8, 2), **more),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="unknown keyword") as raised:
            call()
        assert hint in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_names_of_other_tools_are_no_keywords() -> None:
    assert not {*OTHER_NAMES} & {*PUBLIC_NAMES, *inspect.signature(whet.train).parameters}


SMALL = {"arch": {"hidden_size": 16, "layers": 1, "heads": 2}, "threads": 1, "epochs": 2, "global_batch_size": 8}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = ((f"{'good' if n % 2 else 'bad'} number {n} {n * n}", "even" if n % 2 == 0 else "odd") for n in range(120))
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return path


def test_a_recipe_by_name_is_the_same_as_on_the_command_line(
    table: Path, tmp_path: Path, warm_whet: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = whet.train("text", data="texts.jsonl", on_event=None, measure=False, **SMALL)
    assert isinstance(result, TrainResult)
    assert (result.state, result.path) == ("done", tmp_path / "runs" / "text-001")
    assert "accuracy" in result.metrics
    command = [word if word != "runs/text-001" else "runs/other" for word in whet.open_run(result.path).header.command]
    assert command[:3] == ["whet", "train", "text"]
    done = warm_whet(*command[1:], "--no-measure", "--quiet", "--max-restarts=0")
    assert done.returncode == 0, done.stderr
    here, there = whet.open_run("runs/text-001"), whet.open_run("runs/other")
    assert here.config == there.config
    assert here.curves()["train/loss"]["mean"] == there.curves()["train/loss"]["mean"]
    again = warm_whet(*whet.open_run(result.path).header.command[1:], "--max-restarts=0")
    assert "is done" in again.stderr, "the recorded command belongs to the run"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("txet", {}, "did you mean 'text'"),
        ("text", {"epohcs": 3}, "did you mean 'epochs'"),
        ("text", {"epochs": "three"}, "epochs must be"),
        ("text", {"seeds": 3}, "whet train text seeds=3 --run"),
        ("hex", {"selfplay": True}, "whet train hex selfplay=true --run"),
        ("text", {"data": "missing.jsonl"}, "the data does not exist"),
    ],
)
def test_wrong_recipes_and_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        whet.train(name, **options)
    assert not (tmp_path / "runs").exists()


def test_training_a_model_imports_no_recipe() -> None:
    code = (
        "import sys, torch, whet; m = torch.nn.Linear(2, 1);"
        "whet.train(m, torch.rand(8, 2), loss=lambda b: m(b).mean(), on_event=None,"
        "           optimizer=torch.optim.SGD(m.parameters(), lr=0.1), global_batch_size=8);"
        "print([n for n in sys.modules if n.startswith(('whet.recipes', 'transformers', 'tokenizers'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("num_bytes", [0, 1_000_000])
def test_spawned_workers_of_a_program_without_a_main_guard_are_refused(tmp_path: Path, num_bytes: int) -> None:
    """With a large dataset, Python would wait forever for a worker that has ended."""
    (tmp_path / "own.py").write_text(
        "import torch, whet\n"
        "class Rows(torch.utils.data.Dataset):\n"
        f"    blob = bytes({num_bytes})\n"
        "    def __init__(self): self.content = bytes(self.blob)\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return torch.ones(2)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "whet.train(model, Rows(), loss=lambda x: model(x).mean(), global_batch_size=4, measure=False,\n"
        "           optimizer=torch.optim.SGD(model.parameters(), lr=0.1),\n"
        "           overrides={'workers': 1, 'worker_start_method': 'spawn'})\n"
    )
    ended = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == '  try: def main(): ... and if __name__ == "__main__": main()'
    assert ended.stderr.count("try:") == 1


def test_a_program_without_a_main_guard_says_so(tmp_path: Path) -> None:
    """A spawned worker imports the program; without the guard it would start the training again."""
    (tmp_path / "own.py").write_text(
        "import multiprocessing, whet\n"
        "if __name__ == '__mp_main__':\n"
        "    whet.train(None, None)\n"
        "else:\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    process.start(); process.join(); print(process.exitcode)\n"
    )
    ended = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["1"]
    assert "a data worker imported this program and would train again" in ended.stderr
    assert 'if __name__ == "__main__": main()' in ended.stderr
