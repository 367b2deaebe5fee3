"""Exports: transformers loads the folder, and ONNX's reference evaluator computes the same logits."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_bert import write_rows, write_tiny_bert
from whet.api.export import export_model
from whet.base.errors import UsageError, WhetError
from whet.config.resolve import resolve_config
from whet.recipes.runner import train_recipe
from whet.recipes.text import export
from whet.recipes.text.prediction import TextPredictor
from whet.recipes.text.prediction_files import TextQuery
from whet.recipes.text.recipe import recipe as text_recipe
from whet.run import durable
from whet.run.disk import Disk
from whet.run.folder import open_run
from whet.training.weights import load_weights

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")

TEXTS = ("the fox of fox red", "some flint of flint the flint four", "a")
PAIRS = ("red", "blue green the fox", "of of of of")


def trained(folder: Path, *args: str) -> Path:
    recipe = text_recipe()
    train_recipe(recipe, resolve_config(recipe.Config, [*args, "threads=1"]), run=folder, device="cpu")
    return folder


def probabilities(run: Path, *, has_pairs: bool = False) -> np.ndarray:
    """The probabilities of whet predict."""
    recipe, opened = text_recipe(), open_run(run)
    model, predictor = recipe.predict(recipe.Config.model_validate(opened.config), opened.metadata)
    assert isinstance(predictor, TextPredictor)
    load_weights(run, model, checkpoint="best")
    model.eval()
    queries = [
        TextQuery(row="1", text=text, pair=pair if has_pairs else None) for text, pair in zip(TEXTS, PAIRS, strict=True)
    ]
    return np.array([list(prediction.result["probabilities"].values()) for prediction in predictor.predict(queries)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    rows = write_rows(folder / "rows.jsonl", num_rows=90, has_pairs=True)
    args = (f"data={rows}", f"model={model}", "pair_column=sentence2", "lr=1e-3", "epochs=2")
    return trained(folder / "run", *args)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    rows = write_rows(folder / "rows.jsonl", num_rows=90)
    sizes = ("arch.hidden_size=32", "arch.max_length=24", "arch.vocab_size=400")
    return trained(folder / "run", f"data={rows}", "epochs=1", *sizes)


def test_every_file_of_an_export_is_synced_before_it_has_its_name(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    published: list[set[int]] = []

    class Watched(Disk):
        def full_sync(self, descriptor: int) -> None:
            synced.add(os.fstat(descriptor).st_ino)

        def rename(self, source: Path, target: Path) -> None:
            if target.name == "out":
                published.append({file.stat().st_ino for file in source.iterdir()} - synced)
            super().rename(source, target)

    monkeypatch.setattr(durable, "disk", Watched())
    written = export_model(small_run, to="safetensors", out=tmp_path / "out")
    assert len(written.files) > 1
    assert published == [set()]


def test_transformers_loads_the_export_with_equal_predictions(pair_run: Path, tmp_path: Path) -> None:
    written = export_model(pair_run, to="transformers", out=tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "whet-export.json").read_text())
    assert {*manifest["files"], "whet-export.json"} == {*written.files} >= {"config.json", "model.safetensors"}
    assert manifest["classes"] == ["animal", "plant", "stone"]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer(list(TEXTS), list(PAIRS), padding=True, return_tensors="pt")
    with torch.no_grad():
        actual = theirs(**batch).logits.softmax(1).numpy()
    np.testing.assert_allclose(actual, probabilities(pair_run, has_pairs=True), atol=1e-5)
    assert theirs.config.id2label == dict(enumerate(manifest["classes"]))

    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="other files than an export"):
        export_model(pair_run, to="transformers", out=tmp_path / "out", force=True)
    (tmp_path / "out" / "notes.txt").unlink()
    with pytest.raises(UsageError, match="already exists"):
        export_model(pair_run, to="transformers", out=tmp_path / "out")
    export_model(pair_run, to="transformers", out=tmp_path / "out", force=True, checkpoint="last")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "pair"])
def test_onnx_logits_are_equal_for_other_shapes(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reference = pytest.importorskip("onnx.reference", reason="the extra onnx")
    pytest.importorskip("onnxscript", reason="the extra onnx")
    run = request.getfixturevalue(f"{kind}_run")
    export_model(run, to="onnx", out=tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "whet-export.json").read_text())
    evaluator = reference.ReferenceEvaluator(str(tmp_path / "out" / "model.onnx"))
    if kind == "pair":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        batch = tokenizer(list(TEXTS), list(PAIRS), padding=True, return_tensors="np")
        given = {name: batch[name].astype(np.int64) for name in manifest["inputs"]}
    else:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "out" / "tokenizer.json"), pad_token="<pad>"
        )
        batch = tokenizer(list(TEXTS), padding=True, return_tensors="np")
        given = {name: batch[name].astype(np.int64) for name in manifest["inputs"]}
    (logits,) = evaluator.run(["logits"], given)
    actual = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(actual, probabilities(run, has_pairs=kind == "pair"), atol=1e-4)

    class Other(torch.nn.Module):
        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(logits) + 0.01

    tensors = {name: torch.from_numpy(ids) for name, ids in given.items()}
    with pytest.raises(WhetError, match=r"different logits.*\n.*differ by 0.01"):
        export._check_same_logits(Other(), tmp_path / "out" / "model.onnx", tensors)


def test_failed_exports_leave_no_files(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="not a Transformers model"):
        export_model(small_run, to="transformers", out=tmp_path / "out")
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(UsageError, match=r"no onnxscript\n.*\[onnx\]"):
        export_model(small_run, to="onnx", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
