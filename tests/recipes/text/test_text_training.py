"""The text recipe from the command line and in the loop: learns, equals a plain PyTorch loop, resumes, predicts."""

import copy
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import whet
from fork_server import TIMEOUT_SECONDS
from warm_python import Program, WarmPython
from whet.checkpoint import store
from whet.config.resolve import resolve_config
from whet.data.batch import DictBatch, MicroBatch, Padded
from whet.data.order import epoch_order
from whet.recipes.text.config import count_parameters
from whet.recipes.text.recipe import recipe as text_recipe
from whet.report.run_report import summarize
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

SMALL = ("arch.hidden_size=32", "arch.layers=1", "arch.max_length=24", "arch.vocab_size=600", "threads=1")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose class depends on one word among irrelevant ones."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    filler = ["the", "a", "some", "of", "in", "for", "with", "and", "or", "but", "to", "from", "by", "on"]
    rows = []
    for number in range(600):
        words = [filler[(number * 7 + place * place) % len(filler)] for place in range(3 + number % 9)]
        label = ("animal", "plant", "stone")[number % 3]
        words.insert(number % len(words), {"animal": "fox", "plant": "fern", "stone": "flint"}[label] + str(number % 5))
        rows.append(json.dumps({"text": " ".join(words) + f" {number}", "label": label}))
    path.write_text("\n".join(rows))
    return path


class Cli:
    """Runs `whet ARGS`; unless supervised, without the parent process that would restart a training."""

    def __init__(self, folder: Path, python: WarmPython) -> None:
        self.folder = folder
        self._python = python

    def start(self, *args: object, is_supervised: bool = False) -> Program:
        alone = ("--max-restarts", "0") if args[0] == "train" and not is_supervised else ()
        env = {**os.environ, "WHET_HOME": str(self.folder / "home")}
        return self._python.start("-m", "whet", *args, *alone, cwd=self.folder, env=env)

    def run(self, *args: object, is_supervised: bool = False) -> tuple[int, str, str]:
        done = self.start(*args, is_supervised=is_supervised).wait()
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def cli(tmp_path: Path, warm_python: WarmPython) -> Cli:
    return Cli(tmp_path, warm_python)


def losses(run: Path) -> dict[int, float]:
    return {event.step: event.number("loss") for event in read_events(open_run(run), kinds=("step",))}


def test_train_report_and_predict(cli: Cli, table: Path, tmp_path: Path) -> None:
    code, out, errors = cli.run("train", "text", f"data={table}", "epochs=3", "lr=3e-3", *SMALL)
    assert code == 0, errors
    assert "\nnext      whet report runs/text-001 " in errors
    run = tmp_path / "runs" / "text-001"
    assert out.startswith("ended     all 3 epochs done; ")
    assert "saved     runs/text-001: " in out
    assert len(out.splitlines()) < 12
    assert "test      accuracy" in out
    assert "naive Bayes" in out
    assert (
        "data      read 600 rows of JSON lines; text = text, label = label, 3 classes\ndata      split into" in errors
    )
    head = errors.partition("\ntext  ")[0].splitlines()
    assert [line.split()[0] for line in head if line[:1].strip()] == [
        "data",
        "data",
        "machine",
        "workload",
        "plan",
        "time",
    ]
    report = summarize(run)
    assert report.state == "done"
    assert report.metrics["test_accuracy"] > 0.9
    code, out, errors = cli.run("predict", run, "some fox3 with the", "by flint2 or", "--json", "--checkpoint", "last")
    assert code == 0, errors
    answers = json.loads(out)
    assert [answer["label"] for answer in answers] == ["animal", "stone"]
    assert abs(sum(answers[0]["probabilities"].values()) - 1) < 1e-6
    code, out, errors = cli.run("predict", run, "some fern1")
    assert code == 0, errors
    assert "plant" in out


@pytest.mark.parametrize("shape", ["padded", "packed"])
def test_an_evaluation_has_the_confusion_matrix_and_mistakes(table: Path, shape: str) -> None:
    recipe = text_recipe()
    config = resolve_config(recipe.Config, args=[f"data={table}", *SMALL]).config
    data = recipe.data(config)
    torch.manual_seed(0)
    model = recipe.model(config, data).eval()
    micro_batches = []
    for rows in torch.arange(len(data.val["label"])).split(16):
        tokens, lengths = data.val["tokens"], data.val["tokens"].lengths[rows]
        longest, total = int(lengths.max()), int(lengths.sum())
        padded = tokens.padded(rows, length=longest) if shape == "padded" else None
        field = padded or tokens.packed(rows, max_length=longest, total=total)
        micro_batches.append(
            MicroBatch(fields={"tokens": field, "label": data.val["label"][rows]}, ids=rows.numpy()).data
        )
    with torch.no_grad():
        result = recipe.evaluate(model, iter(micro_batches))
        answers = torch.cat([model(micro.tokens).argmax(1) for micro in micro_batches])
    truth, counts = data.val["label"], result["confusion"]["counts"]
    assert result["accuracy"] == float((answers == truth).double().mean()) < 1
    assert result["confusion"]["labels"] == ["animal", "plant", "stone"]
    for one in range(3):
        for other in range(3):
            assert counts[one][other] == int(((truth == one) & (answers == other)).sum())
    words = {"animal": "fox", "plant": "fern", "stone": "flint"}
    mistakes = result["samples"]
    assert len(mistakes) == 8
    assert all(words[m["expected"]] in m["input"] and m["expected"] != m["predicted"] for m in mistakes)
    assert [m["error"] for m in mistakes] == sorted((m["error"] for m in mistakes), reverse=True)


@pytest.mark.parametrize("form", ["one label", "several labels", "pairs"])
def test_class_weights_match_torch_for_any_micro_batch(tmp_path: Path, form: str) -> None:
    rows = [{"sentence1": f"the fox {n}", "label": ["a", "b", "b"][n % 3]} for n in range(120)]
    if form == "several labels":
        rows = [{"text": row["sentence1"], "labels": [["a"], ["a", "b"], []][n % 3]} for n, row in enumerate(rows)]
    elif form == "pairs":
        long = " which is read too, as far as there is room" * 9
        rows = [{**row, "sentence1": row["sentence1"] + long, "sentence2": "second half" + long} for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    names = {"one label": ["text_column=sentence1"]}.get(form, [])
    recipe = text_recipe()
    config = resolve_config(recipe.Config, [f"data={file}", "class_weights={b: 3}", "dropout=0", *names, *SMALL]).config
    data = recipe.data(config)
    torch.manual_seed(0)
    model = recipe.model(config, data)

    def micro(rows: torch.Tensor) -> DictBatch:
        longest = int(data.train["tokens"].lengths[rows].max())
        fields = {"tokens": data.train["tokens"].padded(rows, length=longest)}
        return DictBatch({**fields, **{n: data.train[n][rows] for n in ("label", "weight")}})

    whole = torch.arange(32)
    total, weight = recipe.loss(model, micro(whole))
    logits, label = model(micro(whole).tokens), data.train["label"][whole]
    weights = torch.tensor([1.0, 3.0])
    if form == "several labels":
        each = functional.binary_cross_entropy_with_logits(logits, label, pos_weight=None, reduction="none")
        expected = (each * torch.where(label > 0, weights, 1.0)).sum() / torch.where(label > 0, weights, 1.0).sum()
    else:
        expected = functional.cross_entropy(logits, label, weight=weights)
    assert torch.allclose(total / weight, expected)
    halves = [recipe.loss(model, micro(half)) for half in whole.split(12)]
    assert torch.allclose(sum(t for t, _ in halves) / sum(w for _, w in halves), expected)
    if form == "pairs":
        first = data.tokenizer.decode(data.train["tokens"].padded(whole[:1], length=24).values[0].tolist())
        assert "fox" in first
        assert "second half" in first


def test_ctrl_c_and_resume_give_the_uninterrupted_curve(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", "epochs=12", "dropout=0.2", "ema=true", *SMALL)
    code, _, errors = cli.run(*words, "--run", "whole")
    assert code == 0, errors
    process = cli.start(*words, "--run", "cut")
    cut = cli.folder / "cut"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and not ((cut / "events.jsonl").exists() and len(losses(cut)) > 20):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stopped = process.wait()
    errors = stopped.stderr
    assert stopped.returncode == 130, errors
    assert f"saved at step {max(losses(cut))} in cut (" in errors
    assert "to resume:" in errors
    assert "--run cut" in errors
    stopped_at = max(losses(cut))
    assert 20 < stopped_at < 180
    code, out, errors = cli.run(*words, "--run", "cut")
    assert code == 0, errors
    assert f"resumes from step {stopped_at}" in errors
    assert "all 12 epochs done" in out
    assert len(list(read_events(open_run(cli.folder / "cut"), kinds=("start", "resume")))) == 2
    assert losses(cut) == losses(cli.folder / "whole")
    ours, theirs = (store.load_newest(open_run(cli.folder / name).checkpoints) for name in ("cut", "whole"))
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(ours[1].tensors[name], tensor) for name, tensor in theirs[1].tensors.items())


def test_a_finished_run_can_be_extended(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", "schedule=constant", *SMALL, "--run", "run")
    assert cli.run(*words, "epochs=1")[0] == 0
    code, out, errors = cli.run(*words, "epochs=1")
    assert code == 0
    assert "is done" in errors
    assert out.startswith("ended     1 epoch done; ")
    assert "saved     run: " in out
    assert len(out.splitlines()) < 12
    assert "test      accuracy" in out
    code, _, errors = cli.run(*words, "epochs=2")
    assert code == 0, errors
    assert max(losses(cli.folder / "run")) == 30
    code, _, errors = cli.run(*words, "epochs=2", "dropout=0.3")
    assert code == 2
    assert "another dropout" in errors
    code, _, errors = cli.run(*words, "epochs=1", "dropout=0.3", "--fresh")
    assert code == 0, errors
    assert max(losses(cli.folder / "run")) == 15


def test_fifty_steps_are_bit_equal_to_a_plain_loop(table: Path) -> None:
    recipe = text_recipe()
    config = resolve_config(recipe.Config, [f"data={table}", "dropout=0.1", *SMALL]).config
    data = recipe.data(config)
    torch.manual_seed(0)
    ours = recipe.model(config, data)
    theirs = copy.deepcopy(ours)

    overrides = {"threads": 1, "micro_batch": 16, "lengths": "fixed", "optimizer_kernels": "yours"}
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    with whet.Session(
        ours, optimizer, data.train, global_batch_size=16, epochs=9, max_steps=50, clip=1.0, seed=5, overrides=overrides
    ) as session:
        for batch in session:
            session.step(lambda micro: recipe.loss(ours, micro), batch)
    assert session.state.step == 50

    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    theirs.train()
    tokens, labels = data.train["tokens"], data.train["label"]
    done = 0
    for epoch in range(9):
        order = torch.from_numpy(epoch_order(len(labels), seed=5, epoch=epoch))
        for rows in order.split(16):
            texts = [tokens[row] for row in rows.tolist()]
            lengths = torch.tensor([len(text) for text in texts])
            padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
            optimizer.zero_grad()
            logits = theirs(Padded(values=padded, lengths=lengths))
            functional.cross_entropy(logits, labels[rows]).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            done += 1
            if done == 50:
                break
        if done == 50:
            break
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name


def test_the_plan_counts_the_model_parameters(table: Path) -> None:
    recipe = text_recipe()
    config = resolve_config(recipe.Config, [f"data={table}", *SMALL]).config
    data = recipe.data(config)
    model = recipe.model(config, data)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert recipe.describe(config, data).num_parameters == counted
    assert count_parameters(config.arch, num_classes=3) == counted


def test_truncated_texts_are_counted_before_training(table: Path) -> None:
    recipe = text_recipe()
    for words, is_told in ((["arch.max_length=4"], True), (["arch.max_length=1000"], False)):
        data = recipe.data(resolve_config(recipe.Config, [f"data={table}", *SMALL, *words]).config)
        lengths = data.train["tokens"].lengths
        line = f"{int((lengths == 4).sum())} of {len(lengths)} training texts have 4 tokens or more"
        assert any(note.startswith(line) for note in data.notes) == is_told, data.notes


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b'{"text": "a", "label": "x"}\n' * 20, "class"),
        (b'{"text": "a b", "label": "x"}\n{"text": "c \xff", "label": "y"}\n', "UTF-8"),
        (b'{"words": "a", "kind": "x"}\n', "text"),
    ],
    ids=["empty", "one class", "not UTF-8", "no text column"],
)
def test_bad_data_is_rejected_before_a_run_folder_exists(cli: Cli, content: bytes, what: str) -> None:
    (cli.folder / "bad.jsonl").write_bytes(content)
    code, _, errors = cli.run("train", "text", "data=bad.jsonl", *SMALL)
    assert code in (1, 2)
    assert what in errors
    assert "Traceback" not in errors
    assert not (cli.folder / "runs").exists()


@pytest.mark.slow
def test_training_on_real_texts(cli: Cli) -> None:
    folder = os.environ.get("WHET_TEST_DATA")
    if not folder:
        pytest.skip("WHET_TEST_DATA is not set")
    code, _, errors = cli.run(
        "train", "text", f"data={folder}/sci-cite", "max_steps=30", "arch.hidden_size=32", "threads=1", "--run", "run"
    )
    assert code == 0, errors
    assert len(open_run(cli.folder / "run").metadata["classes"]) == 3


def test_fresh_keeps_the_old_run_until_the_new_one_starts(cli: Cli, table: Path) -> None:
    words = ("train", "text", *SMALL, "max_steps=3", "--run", "run")
    assert cli.run(*words, f"data={table}")[0] == 0
    (cli.folder / "bad.jsonl").write_text("")
    # The parent process, if there is one, moves the old run away.
    for wrong, is_supervised in (("data=bad.jsonl", True), (f"data={table} --device cuda", False)):
        assert cli.run(*words, *wrong.split(), "--fresh", is_supervised=is_supervised)[0] == 2
        assert len(losses(cli.folder / "run")) == 3, "the old run is still there"
    (cli.folder / "run" / "notes.txt").write_text("mine")
    code, _, errors = cli.run(*words, f"data={table}", "--fresh")
    assert code == 2
    assert "notes.txt" in errors
    assert sorted(path.name for path in cli.folder.iterdir() if path.name.startswith(".tmp-")) == []


def test_changed_texts_are_rejected(cli: Cli, table: Path) -> None:
    copy_of_table = cli.folder / "texts.jsonl"
    copy_of_table.write_text(table.read_text())
    words = ("train", "text", "data=texts.jsonl", *SMALL, "--run", "run")
    assert cli.run(*words, "max_steps=3")[0] == 0
    copy_of_table.write_text(table.read_text().replace("fox", "owl"))
    code, _, errors = cli.run(*words, "max_steps=6")
    assert code == 2
    assert "not what the run was started with" in errors


def test_init_from_uses_the_tokenizer_of_the_run(cli: Cli, table: Path) -> None:
    words = ("train", "text", *SMALL, "max_steps=3")
    assert cli.run(*words, f"data={table}", "--run", "first")[0] == 0
    half = cli.folder / "half.jsonl"
    half.write_text("\n".join(table.read_text().split("\n")[:300]))
    assert cli.run(*words, f"data={half}", "init_from=first", "--run", "second")[0] == 0
    kept = [open_run(cli.folder / name).metadata["tokenizer"] for name in ("first", "second")]
    assert kept[0] == kept[1]
    other = cli.folder / "other.jsonl"
    other.write_text(table.read_text().replace("stone", "metal"))
    code, _, errors = cli.run(*words, f"data={other}", "init_from=first", "--run", "third")
    assert code == 2
    assert "different classes" in errors


def test_a_run_folder_cannot_select_code(cli: Cli, table: Path) -> None:
    assert cli.run("train", "text", *SMALL, "max_steps=3", f"data={table}", "--run", "run")[0] == 0
    header = json.loads((cli.folder / "run" / "run.json").read_text())
    (cli.folder / "evil.py").write_text("open('executed', 'w').close()\n")
    for recipe in ("evil.py", "evil:recipe"):
        changed = {**header, "recipe": recipe, "command": ["whet", "train", recipe]}
        (cli.folder / "run" / "run.json").write_text(json.dumps(changed))
        code, _, errors = cli.run("predict", "run", "a text")
        assert code == 2, errors
        assert not (cli.folder / "executed").exists()


def test_another_learning_rate_needs_allow(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", *SMALL, "--run", "run")
    assert cli.run(*words, "max_steps=2", "lr=0.002", "schedule=constant", "warmup_steps=0")[0] == 0
    changed = (*words, "max_steps=4", "lr=0.005", "schedule=constant", "warmup_steps=0")
    code, _, errors = cli.run(*changed)
    assert code == 2
    assert "--allow lr" in errors
    code, out, errors = cli.run(*changed, "--allow", "lr")
    assert code == 0, errors
    assert "resumes from step 2, not bit-exact: lr 0.002 -> 0.005" in errors
    assert "not bit-exact since step 2" in out
    rates = [event.get("lr") for event in read_events(open_run(cli.folder / "run"), kinds=("step",))]
    assert rates == pytest.approx([0.002, 0.002, 0.005, 0.005])


@pytest.mark.slow
def test_another_batch_size_needs_allow(cli: Cli, table: Path) -> None:
    words = ("train", "text", f"data={table}", *SMALL, "--run", "run")
    assert cli.run(*words, "max_steps=2")[0] == 0
    code, _, errors = cli.run(*words, "max_steps=3", "global_batch_size=16")
    assert code == 2
    assert "--allow batch" in errors
    code, out, errors = cli.run(*words, "max_steps=3", "global_batch_size=16", "--allow", "batch")
    assert code == 0, errors
    assert "resumes from step 2, not bit-exact: global_batch_size 32 -> 16" in errors
    assert "not bit-exact since step 2" in out
