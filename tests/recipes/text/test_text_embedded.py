"""The embedded dataset: balanced, without library names, read without imports, reproducible."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from whet.base.errors import WhetError
from whet.base.extras import install_hint
from whet.cli import main
from whet.recipes.text import embedded
from whet.recipes.text.config import EMBEDDED_CLASSES, TextConfig, describe
from whet.recipes.text.corpus import Corpus, Examples, split
from whet.recipes.text.data import baseline_metrics
from whet.recipes.text.embedded import LIBRARIES, read_docstrings, remove_library_names
from whet.recipes.text.recipe import TextRecipe

pytestmark = pytest.mark.torch

ROWS = 200


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHET_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHET_HOME", str(tmp_path_factory.mktemp("home")))
        return read_docstrings(rows_per_class=ROWS)


def all_texts(corpus: Corpus) -> list[str]:
    return [*corpus.train.texts, *corpus.val.texts, *corpus.test.texts]


def names_a_library(text: str) -> bool:
    names = ("torch", "transformers", "numpy", "sympy", "networkx", "huggingface", "hugging face")
    return any(name in text.lower() for name in names) or bool({"np", "nx"} & set(re.findall(r"\w+", text.lower())))


def small_library(root: Path, *, docstrings: list[str]) -> Path:
    root.mkdir()
    functions = "\n".join(f"def f{n}():\n    {text!r}" for n, text in enumerate(docstrings))
    (root / "only.py").write_text(functions)
    return root


# --- the texts -------------------------------------------------------------------------------------------------------


def test_splits_are_balanced(corpus: Corpus) -> None:
    assert corpus.classes == LIBRARIES
    for part, rows in ((corpus.train, 0.8 * ROWS), (corpus.val, 0.1 * ROWS), (corpus.test, 0.1 * ROWS)):
        assert Counter(part.labels) == dict.fromkeys(range(EMBEDDED_CLASSES), rows)


def test_texts_are_unique_across_splits(corpus: Corpus) -> None:
    essences = [re.sub(r"[^a-z]", "", text.lower()) for text in all_texts(corpus)]
    assert len(set(essences)) == len(essences) == EMBEDDED_CLASSES * ROWS


def test_no_text_names_its_library(corpus: Corpus) -> None:
    assert [text for text in all_texts(corpus) if names_a_library(text)] == []
    assert {30 <= len(text) <= 400 for text in all_texts(corpus)} == {True}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("PyTorch's `torch.nn.Module` and TorchScript", "'s `.nn.Module` and Script"),
        ("call np.dot, then nx.Graph()", "call .dot, then .Graph()"),
        ("the npz format, six functions, an index", "the npz format, six functions, an index"),
        ("NetworkX, SymPy's NumPyPrinter, from_numpy", ", 's Printer, from_"),
        ("a Hugging Face Transformer, Transformers,\n  HuggingFace", "a , ,"),
    ],
)
def test_library_names_are_removed(text: str, hidden: str) -> None:
    assert remove_library_names(text) == hidden


def test_the_baseline_is_neither_trivial_nor_random(corpus: Corpus) -> None:
    assert 0.5 < baseline_metrics(corpus)["naive Bayes"]["accuracy"] < 0.95


@pytest.mark.slow
def test_the_full_corpus_is_read_quickly_without_imports(home: Path) -> None:
    script = (
        "import sys, time\n"
        "from whet.recipes.text.embedded import LIBRARIES, read_docstrings\n"
        "corpus = read_docstrings()\n"
        "print(len(corpus.train), time.process_time(), [name for name in LIBRARIES if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    rows, seconds, imported = done.stdout.split(maxsplit=2)
    assert int(rows) == describe(TextConfig()).num_samples
    assert float(seconds) < 10
    assert imported.strip() == "[]"
    full = read_docstrings()  # The child has filled the cache.
    assert [text for text in all_texts(full) if names_a_library(text)] == []
    assert 0.7 < baseline_metrics(full)["naive Bayes"]["accuracy"] < 0.9


# --- reproducibility --------------------------------------------------------------------------------------------------


def test_the_corpus_does_not_depend_on_directory_order(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = read_docstrings(rows_per_class=40)
    real = os.walk

    def backwards(root: Path):
        for folder, below, names in real(root):
            below.sort(reverse=True)
            yield folder, below, sorted(names, reverse=True)

    monkeypatch.setattr(embedded.os, "walk", backwards)
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "another, without a cache"))
    assert read_docstrings(rows_per_class=40).fingerprint == forwards.fingerprint


def test_a_second_read_comes_from_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_docstrings(rows_per_class=20)
    monkeypatch.setattr(embedded, "_collect", lambda rows: pytest.fail("read the libraries again"))
    assert read_docstrings(rows_per_class=20) == first


@pytest.mark.parametrize(
    "damage", ["changed", "empty", *(pytest.param(name, marks=pytest.mark.slow) for name in ("truncated", "other"))]
)
def test_a_damaged_cache_is_rebuilt(home: Path, damage: str) -> None:
    first = read_docstrings(rows_per_class=20)
    (cache,) = home.rglob("*.json")
    good = cache.read_text()
    rows = json.loads(good)
    rows["rows"][0][0] += "!"
    cache.write_text({"truncated": good[:-9], "changed": json.dumps(rows), "empty": "", "other": "[1]"}[damage])
    assert read_docstrings(rows_per_class=20) == first
    assert cache.read_text() == good


def test_a_new_library_version_invalidates_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_docstrings(rows_per_class=20)
    monkeypatch.setattr(embedded.importlib.metadata, "version", lambda name: "99")
    read_docstrings(rows_per_class=20)
    assert len(list(home.rglob("*.json"))) == 2


def test_an_unwritable_cache_folder_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("WHET_HOME", str(home / "file"))
    assert len(read_docstrings(rows_per_class=10).train) == 48


# --- missing and small libraries -------------------------------------------------------------------------------------


def test_a_missing_library_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = embedded.importlib.util.find_spec
    monkeypatch.setattr(
        embedded.importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name)
    )
    with pytest.raises(WhetError, match="need transformers, which is not installed") as caught:
        read_docstrings(rows_per_class=10)
    assert install_hint("text") in str(caught.value)
    recipe = TextRecipe()
    for config in (TextConfig(), TextConfig(model="bert-base-uncased", data="reviews.csv")):
        with pytest.raises(WhetError) as refused:
            recipe.check_installed(config)
        assert install_hint("text") in str(refused.value.try_)
        # A plan does not need the library, and says that training does.
        assert recipe.assumptions(config)[-1].startswith("to train on this machine: ")
        assert install_hint("text") in recipe.assumptions(config)[-1]
    recipe.check_installed(TextConfig(data="reviews.csv"))


def test_training_without_a_library_fails_before_torch_is_imported(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: TextRecipe, config: TextConfig) -> None:
        raise WhetError("no transformers", try_="install them")

    monkeypatch.setattr(TextRecipe, "check_installed", refuse)
    monkeypatch.setattr(TextRecipe, "data", lambda *_: pytest.fail("the data is read"))
    assert main.run(["train", "text", "--max-restarts=0", "--run", str(tmp_path / "run")]) == 1
    assert "no transformers" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_small_library_contributes_later_paragraphs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [chr(97 + n // 26) + chr(97 + n % 26) for n in range(40)]
    texts = [
        f"The first paragraph about {word} and its kin.\n\nThe second paragraph: {word} at length." for word in words
    ]
    texts[0] = "The first paragraph about a and its kin.\n\nParameters of this function here\n----------"
    library = small_library(tmp_path / "small", docstrings=texts)
    monkeypatch.setattr(embedded, "_root", lambda name: library)
    result = embedded._read_library("small", seen=set(), enough=79)
    assert [text.startswith("The first") for text in result] == [True] * 40 + [False] * 39
    with pytest.raises(WhetError, match="too few docstrings") as caught:
        embedded._read_library("small", seen=set(), enough=80)
    assert "79 of 80" in str(caught.value)


def test_files_with_syntax_errors_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = small_library(tmp_path / "small", docstrings=["A docstring that is long enough to count."])
    (library / "broken.py").write_bytes(b"def (:\n")
    (library / "zeros.py").write_bytes(b"\0\0")
    (library / "escapes.py").write_text('x = "\\d"\n')
    monkeypatch.setattr(embedded, "_root", lambda name: library)
    assert len(embedded._read_library("small", seen=set(), enough=1)) == 1


# --- splitting -------------------------------------------------------------------------------------------------------


def test_equal_texts_stay_in_one_split() -> None:
    texts = tuple(f"text {n % 50}" for n in range(200))
    corpus = split(Examples(texts=texts, labels=(0,) * 100 + (1,) * 100), classes=["a", "b"])
    train, val, test = (set(part.texts) for part in (corpus.train, corpus.val, corpus.test))
    assert (len(train), len(val), len(test)) == (40, 5, 5)
    assert not train & val | train & test | val & test
    assert len(corpus.train) + len(corpus.val) + len(corpus.test) == 200


def test_a_rare_class_is_kept_for_training() -> None:
    texts = tuple(f"text {n}" for n in range(102))
    corpus = split(Examples(texts=texts, labels=(0,) * 100 + (1,) * 2), classes=["often", "rare"])
    assert Counter(corpus.train.labels) == {0: 80, 1: 2}


def test_the_split_does_not_depend_on_the_order_of_rows() -> None:
    texts = tuple(f"text {n}" for n in range(100))
    forward = split(Examples(texts=texts, labels=(0, 1) * 50), classes=["a", "b"])
    backward = split(Examples(texts=texts[::-1], labels=(1, 0) * 50), classes=["a", "b"])
    assert set(forward.test.texts) == set(backward.test.texts)


def test_the_fingerprint_depends_on_every_split(corpus: Corpus) -> None:
    swapped = Corpus(classes=corpus.classes, train=corpus.train, val=corpus.test, test=corpus.val)
    renamed = Corpus(classes=corpus.classes[::-1], train=corpus.train, val=corpus.val, test=corpus.test)
    assert len({corpus.fingerprint, swapped.fingerprint, renamed.fingerprint}) == 3
