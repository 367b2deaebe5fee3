"""The linear classifier of n-grams: vocabulary, logits, defaults, and a training on uneven classes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.api.search import prepare_search
from whet.base.errors import UsageError
from whet.config.resolve import resolve_config
from whet.data.batch import DictBatch, Ragged
from whet.recipes.runner import train_recipe
from whet.recipes.text.config import TextConfig
from whet.recipes.text.corpus_reader import read_files
from whet.recipes.text.data import baseline_metrics
from whet.recipes.text.ngrams import MAX_COUNT, NgramClassifier, NgramVocabulary
from whet.recipes.text.recipe import recipe as text_recipe
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

TEXTS = ["the red fox", "the green fern", "the red fern", "a fox"]


def write_uneven(path: Path, *, num_common: int = 190, num_rare: int = 14) -> Path:
    """Write two classes that one word tells apart, among words that say nothing."""
    labels = ["common"] * num_common + ["rare"] * num_rare
    rows = [
        {"text": f"item {n} of list {n % 7} is {'scarlet' if label == 'rare' else 'plain'}", "label": label}
        for n, label in enumerate(labels)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ngrams_of_one_text_are_left_out() -> None:
    vocabulary = NgramVocabulary.train(TEXTS)
    ids = vocabulary.encode(["the red green fox", "nothing known"], max_length=1_000)
    assert vocabulary.decode(ids[0]) == "the red fox"  # "green" occurs in one training text only.
    assert vocabulary.decode(ids[1]) == ""
    assert max(ids[0]) // MAX_COUNT < vocabulary.vocab_size == len(vocabulary.weights())
    assert NgramVocabulary.from_json(vocabulary.to_json()).encode(TEXTS, max_length=9) == vocabulary.encode(
        TEXTS, max_length=9
    )


def test_rare_ngrams_weigh_more() -> None:
    vocabulary = NgramVocabulary.train(TEXTS)
    (the,), (fox,) = (vocabulary.encode([word], max_length=1) for word in ("the", "fox"))
    weights = vocabulary.weights()
    assert weights[0] == 0 < weights[the[0] // MAX_COUNT] < weights[fox[0] // MAX_COUNT]


def test_repeated_ngrams_weigh_more_by_the_logarithm_of_their_count() -> None:
    vocabulary = NgramVocabulary.train(TEXTS)
    model = NgramClassifier(vocabulary, strengths=[1.0])
    (red,), (fox,) = (vocabulary.encode([word], max_length=1) for word in ("red", "fox"))
    with torch.no_grad():
        model.weight[red[0] // MAX_COUNT] = 1.0

    def logit(text: str) -> float:
        known = (red[0] // MAX_COUNT, fox[0] // MAX_COUNT)
        tokens = [token for token in vocabulary.encode([text], max_length=99)[0] if token // MAX_COUNT in known]
        padded = Ragged.of([torch.tensor(tokens)]).padded(torch.arange(1), length=len(tokens))
        return float(model(padded).detach()[0, 0])

    idf = vocabulary.weights()
    for count in (1, 3, 2 * MAX_COUNT):
        ours = (1 + math.log(min(count, MAX_COUNT))) * idf[red[0] // MAX_COUNT]
        expected = ours / math.hypot(ours, idf[fox[0] // MAX_COUNT])
        assert logit("red " * count + "fox") == pytest.approx(expected, rel=1e-5)


def test_rare_classes_of_the_linear_classifier_decay_more(tmp_path: Path) -> None:
    recipe = text_recipe()
    file = write_uneven(tmp_path / "rows.jsonl", num_common=400, num_rare=60)
    config = resolve_config(TextConfig, [f"data={file}"]).config
    data = recipe.data(config)
    common, rare = data.class_counts
    strengths = [math.sqrt(common / 500 * rare / 500), rare / 500]
    assert recipe.optimizer(config).weight_decay == pytest.approx(1 / (common + rare))
    model = recipe.model(config, data)
    assert model.scale.tolist() == pytest.approx([math.sqrt(c) for c in strengths])
    given = resolve_config(TextConfig, [f"data={file}", "weight_decay=0.5"]).config
    assert recipe.optimizer(given).weight_decay == 0.5
    assert recipe.optimizer(resolve_config(TextConfig, []).config).weight_decay == 0.01


@pytest.mark.parametrize("given", [[], ["class_weights={rare: 100}"]], ids=["balanced", "given"])
def test_weights_of_the_linear_classifier_count_the_same_in_every_batch(tmp_path: Path, given: list[str]) -> None:
    recipe = text_recipe()
    words = [f"data={write_uneven(tmp_path / 'rows.jsonl')}", *given]
    config = resolve_config(TextConfig, words).config
    data = recipe.data(config)
    model = recipe.model(config, data)
    weight = data.train["weight"]
    assert float(weight.mean()) == pytest.approx(1)

    def loss(rows: Tensor) -> Tensor:
        length = int(data.train["tokens"].lengths.max())
        fields = {"tokens": data.train["tokens"].padded(rows, length=length)}
        fields |= {name: data.train[name][rows] for name in ("label", "weight")}
        found = recipe.loss(model, DictBatch(fields))
        assert isinstance(found, Tensor)
        return found

    # All losses are log 2 at the beginning. A batch of rare rows has their full weight.
    rare = (weight > 1).nonzero().flatten()
    assert float(loss(rare).detach()) == pytest.approx(math.log(2) * float(weight.max()), rel=1e-5)


def test_padded_and_packed_texts_have_the_same_logits() -> None:
    vocabulary = NgramVocabulary.train(TEXTS)
    model = NgramClassifier(vocabulary, strengths=[1.0] * 3)
    torch.nn.init.normal_(model.weight)
    column = Ragged.of([torch.tensor(ids) for ids in vocabulary.encode([*TEXTS, "!!"], max_length=1_000)])
    rows, longest = torch.arange(5), int(column.lengths.max())
    padded = model(column.padded(rows, length=longest + 3))
    packed = model(column.packed(rows, max_length=longest, total=int(column.lengths.sum())))
    torch.testing.assert_close(padded, packed)
    torch.testing.assert_close(padded[4], model.bias)
    # Both kinds of n-grams have norm 1, however long the text is.
    assert padded[:4].abs().max() <= 2 * model.weight.norm(dim=0).max()
    total = int(column.lengths.sum())
    whole = column.packed(rows, max_length=longest, total=total)
    filled = column.filled(whole, total=total + 5, num_fillers=3)
    torch.testing.assert_close(model(filled), padded)
    gradients = [torch.autograd.grad(logits.square().sum(), model.weight)[0] for logits in (padded, packed)]
    torch.testing.assert_close(*gradients)


def test_packed_texts_are_classified_without_padding() -> None:
    """A padded batch of one long text and many short ones is nearly all padding."""
    model = NgramClassifier(NgramVocabulary.train(TEXTS), strengths=[1.0] * 3)
    column = Ragged.of([torch.ones(1_000, dtype=torch.long), *([torch.ones(2, dtype=torch.long)] * 99)])
    packed = column.packed(torch.arange(100), max_length=1_000, total=1_198)
    sizes: list[int] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **kwargs or {})
            sizes.extend(tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, Tensor))
            return out

    with Recorded():
        model(packed).sum().backward()
    assert max(sizes) <= max(1_198, model.weight.numel())


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], "small"),
        (["data=FILE"], "linear"),
        (["data=FILE", "arch.layers=2"], "small"),
        (["data=FILE", "dropout=0.2"], "small"),
        (["data=FILE", "model=small"], "small"),
    ],
)
def test_the_model_that_is_trained_by_default(words: list[str], model: str) -> None:
    config = resolve_config(TextConfig, words).config
    assert (config.model, config.optimizer) == (model, "sgd" if model == "linear" else "adamw")


@pytest.mark.parametrize("word", ["arch.layers=2", "arch.max_length=9", "word_dropout=0.1", "dropout=0.1", "lora=4"])
def test_options_of_other_models_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match=word.partition("=")[0].rpartition(".")[2]):
        resolve_config(TextConfig, ["data=FILE", "model=linear", word])


def test_uneven_classes(tmp_path: Path) -> None:
    data = write_uneven(tmp_path / "rows.jsonl")
    resolved = resolve_config(TextConfig, [f"data={data}", "threads=1"])
    events: list[dict[str, object]] = []
    run = tmp_path / "run"
    result = train_recipe(
        text_recipe(), resolved, run=run, device="cpu", on_event=lambda kind, fields: events.append({kind: fields})
    )
    assert result.state == "done"
    assert "rare classes (rare): class_weights=balanced and goal=macro_f1 by default" in str(events)
    tested = [event for event in read_events(open_run(run), kinds=("eval",)) if "test_macro_f1" in event.fields][-1]
    # Without balanced weights, every text is called common: a macro-F1 of 0.49.
    assert tested.fields["test_macro_f1"] == 1.0
    baseline = open_run(run).metadata["baseline"]
    assert 0.4 < baseline["most frequent class"] < 0.5
    assert baseline == {name: scores["macro_f1"] for name, scores in baseline_metrics(read_files(data).corpus).items()}


def test_other_models_are_advised(tmp_path: Path) -> None:
    recipe = text_recipe()
    config = resolve_config(TextConfig, [f"data={write_uneven(tmp_path / 'rows.jsonl')}", "model=small"]).config
    data = recipe.data(config)
    assert data.notes[-1] == "rare classes (rare): goal=macro_f1 by default; try class_weights=balanced"
    assert "weight" not in data.train
    assert recipe.selected_goal(config) == "macro_f1"


def test_a_search_compares_by_the_goal_of_its_trials(tmp_path: Path) -> None:
    uneven = write_uneven(tmp_path / "rows.jsonl")
    even = write_uneven(tmp_path / "even.jsonl", num_rare=190)
    goals = [prepare_search("text", [f"data={data}", "lr=0.1..1"]).config.goal for data in (uneven, even)]
    assert goals == ["macro_f1", "accuracy"]


def test_a_default_batch_is_limited_to_the_data(tmp_path: Path) -> None:
    data = write_uneven(tmp_path / "few.jsonl", num_common=40, num_rare=10)
    words = [f"data={data}", "epochs=2", "threads=1"]
    notes: list[str] = []

    def train(*more: str, run: str = "run") -> int:
        resolved = resolve_config(TextConfig, [*words, *more])
        return train_recipe(
            text_recipe(),
            resolved,
            run=tmp_path / run,
            device="cpu",
            on_event=lambda _, fields: notes.extend(fields.get("notes", ())),
        ).step

    assert train() == 2
    assert notes[-1] == "global_batch_size=40: all samples (the default is 128)"
    assert open_run(tmp_path / "run").config["global_batch_size"] == 40
    assert train("epochs=3") == 3
    with pytest.raises(UsageError, match="smaller than one global batch"):
        train("global_batch_size=128", run="other")
