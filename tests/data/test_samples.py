"""Samples of datasets without a DataLoader: the batch keeps their structure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loader_cases import SIZE, Item, Labelled, Samples, X, Y
from loader_runs import differences, resumed_batches, run_batches
from whet.base.errors import UsageError
from whet.data.batch import DictBatch
from whet.data.sample import DatasetReader
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch

DATA: dict[str, tuple[Any, Any]] = {
    "a tensor": (lambda i: X[i], lambda ids: X[ids]),
    "a pair": (lambda i: (X[i], int(Y[i])), lambda ids: (X[ids], Y[ids])),
    "a list": (lambda i: [X[i], int(Y[i])], lambda ids: (X[ids], Y[ids])),
    "three fields": (lambda i: (X[i], int(Y[i]), i), lambda ids: (X[ids], Y[ids], torch.tensor(ids))),
    "a dict": (lambda i: {"x": X[i], "i": i}, lambda ids: {"x": X[ids], "i": torch.tensor(ids)}),
    "a named tuple": (lambda i: Labelled(X[i], i), lambda ids: Labelled(X[ids], torch.tensor(ids))),
    "a dataclass": (lambda i: Item(X[i], i), lambda ids: [Item(X[i], i) for i in ids]),
    "a string": (lambda i: "word " * i, lambda ids: ["word " * i for i in ids]),
    "a field of None": (lambda i: (X[i], None), lambda ids: (X[ids], [None] * len(ids))),
    "nested lists": (
        lambda i: {"a": [[1, 2], [3, i]], "b": []},
        lambda ids: {"a": torch.tensor([[[1, 2], [3, i]] for i in ids]), "b": [[] for _ in ids]},
    ),
    "boxes": (
        lambda i: (X[i], {"boxes": torch.ones(i % 3, 4) * i, "name": str(i)}),
        lambda ids: (
            X[ids],
            {"boxes": [torch.ones(i % 3, 4) * i for i in ids], "name": [str(i) for i in ids]},
        ),
    ),
    "float64 of NumPy": (
        lambda i: (np.arange(3.0) + i, np.float64(i), np.int32(i)),
        lambda ids: (
            torch.arange(3.0) + torch.tensor(ids)[:, None],
            torch.tensor(ids).float(),
            torch.tensor(ids, dtype=torch.int32),
        ),
    ),
}


def plain(value: Any) -> Any:
    """Return a batch without whet's own types, which add attributes."""
    if isinstance(value, DictBatch):
        return {name: plain(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    return tuple(value) if isinstance(value, tuple) and not hasattr(value, "_fields") else value


IN_GATE = ("a named tuple", "a dataclass", "boxes")
"""With workers and with a kill; in this process all are read."""


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=pytest.mark.slow) if workers and name not in IN_GATE else (name, workers)
        for workers in (0, 2)
        for name in DATA
    ],
)
def test_a_batch_has_the_structure_of_its_samples(name: str, workers: int) -> None:
    sample, expected = DATA[name]
    seen = run_batches(Samples(sample), global_batch_size=6, workers=workers)
    assert len(seen.batches) == 8
    found = [differences(plain(batch), expected(ids)) for batch, ids in zip(seen.batches, seen.ids, strict=True)]
    assert not any(found), next(filter(None, found))


@pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in DATA]
)
def test_a_killed_run_sees_the_same_samples(name: str, memory_folder: Path) -> None:
    def data() -> Samples:
        return Samples(DATA[name][0])

    whole = run_batches(data(), global_batch_size=6)
    resumed = resumed_batches(data, memory_folder / "run", kill=6, global_batch_size=6)
    assert resumed.ids == whole.ids[4:]
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.exactness.startswith(CUSTOM_LOOP)


def test_a_list_of_many_tensors_is_a_list_of_samples() -> None:
    seen = run_batches([X[index] for index in range(SIZE)], global_batch_size=6, epochs=1)
    assert [batch.shape for batch in seen.batches] == [(6, 3)] * 3 + [(2, 3)]


def test_a_short_list_of_tensors_is_refused_as_ambiguous() -> None:
    with pytest.raises(UsageError, match="a list of tensors may be a list of samples or of columns"):
        run_batches([X, Y], global_batch_size=6, epochs=1)
    seen = run_batches((X, Y), global_batch_size=6, epochs=1)
    assert [part.shape for part in seen.batches[0]] == [(6, 3), (6,)]


def test_a_dataset_with_a_state_of_its_own_is_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = Samples(lambda i: X[i] + draw.normal())
    resumed = resumed_batches(lambda: data, tmp_path / "run", kill=4, global_batch_size=6)
    assert "not bit-exact: the dataset returns another sample each time" in resumed.exactness


# --- tokens ----------------------------------------------------------------------------------------------------------


def tokens(index: int) -> dict[str, Any]:
    return {"input_ids": list(range(1, 2 + index % 4)), "label": index % 2}


def test_a_dataset_of_which_only_later_samples_are_random_is_not_repeatable() -> None:
    draw = torch.Generator().manual_seed(0)
    noisy = Samples(lambda i: X[i] + (torch.rand(1, generator=draw) if i > SIZE // 2 else 0))
    assert not DatasetReader(noisy, seed=0).identify([0, SIZE - 1]).is_repeatable
    assert DatasetReader(Samples(lambda i: X[i]), seed=0).identify([0, SIZE - 1]).is_repeatable


def test_tokens_of_different_lengths_are_padded_like_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")

    class Tokenizer:
        """What DataCollatorWithPadding asks of a tokenizer."""

        def pad(self, features: Any, **_: Any) -> dict[str, torch.Tensor]:
            longest = max(len(feature["input_ids"]) for feature in features)

            def column(name: str, fill: int) -> torch.Tensor:
                values = [f.get(name, [1] * len(f["input_ids"])) for f in features]
                return torch.tensor([list(v) + [fill] * (longest - len(v)) for v in values])

            return {
                "input_ids": column("input_ids", 9),
                "label": torch.tensor([f["label"] for f in features]),
                "attention_mask": column("attention_mask", 0),
            }

        def __init__(self) -> None:
            self.deprecation_warnings: dict[str, bool] = {}

    from whet.data.padding import pad_tokens

    collate = transformers.DataCollatorWithPadding(Tokenizer())
    samples = [tokens(index) for index in range(6)]
    ours, theirs = pad_tokens(samples, pad_token_id=9), collate([dict(sample) for sample in samples])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_tokens_without_a_padding_token_are_refused() -> None:
    with pytest.raises(UsageError, match="need a padding token"):
        run_batches(Samples(tokens), global_batch_size=6)


@pytest.mark.parametrize("has_loader", [False, True])
@pytest.mark.parametrize("format_", [None, "torch"])
def test_a_dataset_of_hugging_face(format_: str | None, has_loader: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from torch.utils.data import DataLoader

    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist(), "text": ["a"] * SIZE})
    table = table.with_format(format_)
    data = DataLoader(table, batch_size=6, shuffle=True) if has_loader else table
    options = {} if has_loader else {"global_batch_size": 6}
    seen = run_batches(data, **options)
    for batch, ids in zip(seen.batches, seen.ids, strict=True):
        assert torch.equal(batch["y"], Y[ids])
        assert batch["text"] == ["a"] * len(ids)
        if has_loader and format_ is None:
            # torch's default collate function transposes lists.
            assert torch.equal(torch.stack(batch["x"], dim=1).float(), X[ids])
        else:
            assert torch.equal(batch["x"], X[ids])
    resumed = resumed_batches(lambda: data, tmp_path / "run", kill=4, **options)
    assert torch.equal(resumed.weights, seen.weights)


def test_a_model_that_is_a_module_learns_from_named_tuples() -> None:
    """The micro-batches of a named tuple are named tuples too."""
    import whet

    model = nn.Linear(3, 5)
    sizes: list[int] = []

    def loss(batch: Labelled) -> torch.Tensor:
        sizes.append(len(batch.label))
        return nn.functional.cross_entropy(model(batch.image), batch.label)

    whet.train(
        model,
        Samples(lambda i: Labelled(X[i], int(Y[i]))),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=10,
        split_batch=True,
        overrides={"threads": 1, "micro_batch": 5, "workers": 0},
        on_event=None,
    )
    assert sizes[-4:] == [5] * 4
