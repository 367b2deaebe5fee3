"""Batches of any structure: flattened, rebuilt, divided into rows and sent between processes."""

import collections
import dataclasses
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from loader_cases import Item, Labelled
from loader_runs import differences
from whet.data.batch import DictBatch
from whet.data.sample import pack_samples
from whet.data.structure import flatten, row_obstacle, select_rows

pytestmark = pytest.mark.torch


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any


tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    st.integers(0, 99),
)
leaves = tensors | st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
keys = st.text("ab.0#x", max_size=3) | st.integers(0, 3)


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=4).map(tuple)
        | st.dictionaries(keys, parts, max_size=4)
        | st.dictionaries(keys, parts, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(st.text("ab", max_size=2), parts, max_size=3).map(DictBatch)
        | st.builds(Labelled, parts, parts)
        | st.builds(Item, parts, parts)
        | st.builds(Frozen, parts, parts)
    )


structures = st.recursive(leaves, containers, max_leaves=12)


@given(structures)
def test_flattening_is_reversible(batch: Any) -> None:
    fields, make = flatten(batch)
    assert differences(make(fields), batch) is None
    # In any order of the fields, because a device may move them one by one.
    assert differences(make(dict(reversed(fields.items()))), batch) is None
    # Every tensor reaches the batch once: none is moved twice, and none is forgotten.
    numbered = {name: torch.tensor(number) for number, name in enumerate(fields)}
    found, _ = flatten(make(numbered))
    assert [int(tensor) for tensor in found.values()] == list(range(len(fields)))


@given(structures)
def test_batches_survive_the_way_from_a_worker(batch: Any) -> None:
    assert differences(ForkingPickler.loads(pack_samples(batch)), batch) is None


@pytest.mark.parametrize(
    "batch",
    [{"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, {0: torch.zeros(2), "0": torch.ones(2)}, {"": torch.zeros(2)}],
)
def test_tensors_of_one_name_are_kept_apart(batch: Any) -> None:
    fields, make = flatten(batch)
    assert len(fields) == len(batch)
    assert differences(make(fields), batch) is None


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_strides_survive_the_way_from_a_worker(order: tuple[int, ...]) -> None:
    tensor = torch.arange(120.0).reshape(2, 3, 4, 5).permute(order)
    (sent,) = ForkingPickler.loads(pack_samples([tensor]))
    assert sent.stride() == tensor.stride()
    assert torch.equal(sent, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 3).expand(4, 3),
        torch.arange(10)[::2],
        torch.zeros(0, 3),
        torch.tensor(3.0),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_unusual_tensors_survive_the_way_from_a_worker(tensor: Tensor) -> None:
    sent = ForkingPickler.loads(pack_samples({"tensor": tensor}))["tensor"]
    assert sent.dtype == tensor.dtype
    assert torch.equal(sent, tensor)
    if tensor.numel() and not tensor.requires_grad:
        sent += 1  # A loss may write into its batch.


# --- rows ------------------------------------------------------------------------------------------------------------


def rows_of(kind: st.SearchStrategy[int], num_samples: int) -> st.SearchStrategy[Any]:
    """Batches whose tensors have one row per sample, with values that tell the sample."""

    def rows(width: int) -> Tensor:
        return torch.arange(num_samples)[:, None] * torch.ones(width, dtype=torch.long)

    leaf = (
        kind.map(rows)
        | st.just(torch.arange(num_samples))
        | st.just([str(number) for number in range(num_samples)])
        | st.just("shared")
        | st.just(7)
    )
    return st.recursive(
        leaf,
        lambda parts: (
            st.dictionaries(st.text("abc", max_size=2), parts, max_size=3)
            | st.lists(parts, min_size=1, max_size=4)
            | st.lists(parts, min_size=1, max_size=4).map(tuple)
            | st.builds(Labelled, parts, parts)
            | st.builds(Item, parts, parts)
        ),
        max_leaves=6,
    )


@given(st.data(), st.integers(2, 6))
def test_a_batch_that_can_be_divided_is_divided_into_its_samples(data: Any, num_samples: int) -> None:
    batch = data.draw(rows_of(st.integers(1, 4), num_samples))
    if row_obstacle(batch, num_samples) is not None:
        return
    cut = data.draw(st.integers(1, num_samples - 1))
    for rows in (slice(0, cut), slice(cut, num_samples), np.array([num_samples - 1, 0])):
        expected = list(range(num_samples))[rows] if isinstance(rows, slice) else rows.tolist()
        part = select_rows(batch, rows, num_samples)
        assert type(part) is type(batch)
        for tensor in flatten(part)[0].values():
            assert tensor.reshape(len(expected), -1)[:, 0].tolist() == expected
        for names in strings(part):
            assert names == [str(number) for number in expected]


def strings(value: Any) -> list[list[str]]:
    if isinstance(value, list) and value and all(isinstance(part, str) and part.isdigit() for part in value):
        return [value]
    if isinstance(value, collections.abc.Mapping):
        value = list(value.values())
    if dataclasses.is_dataclass(value):
        value = [value.image, value.label]
    return [found for part in value for found in strings(part)] if isinstance(value, tuple | list) else []


@pytest.mark.parametrize(
    ("batch", "num_samples", "what"),
    [
        # A pair of fields in a batch of two samples, whether or not each field could be divided.
        ((torch.zeros(2, 3), torch.zeros(2)), 2, "may be a list of 2 samples or of 2 fields"),
        ((torch.zeros(2, 3, 4, 4), torch.zeros(7, 4)), 2, r"1 has shape \(7, 4\)"),
        ((torch.zeros(2, 3), torch.zeros(7, dtype=torch.long)), 2, r"1 has shape \(7,\)"),
        ((torch.zeros(2, 3), [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}]), 2, "may be a list of 2"),
        ([torch.zeros(2, 3), ["a", "b", "c"]], 2, "1 is a list of 3"),
        ((torch.zeros(4, 3), torch.zeros(4), "name", torch.zeros(5)), 4, r"3 has shape \(5,\)"),
        # What belongs to the batch as a whole.
        ({"x": torch.zeros(4, 3), "scale": torch.tensor(2.0)}, 4, r"scale has shape \(\)"),
        ({"x": torch.zeros(4, 3), "ids": np.arange(4)}, 4, "ids is a ndarray"),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2, "shape"),
        ("text", 4, "no tensor"),
    ],
)
def test_a_batch_that_might_be_divided_wrongly_stays_whole(batch: Any, num_samples: int, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(row_obstacle(batch, num_samples))


@pytest.mark.parametrize(
    ("batch", "num_samples"),
    [
        ((torch.zeros(4, 3), [{"boxes": torch.zeros(n, 4)} for n in (1, 4, 2, 0)]), 4),
        ([(torch.zeros(4, n, n), {"label": n}) for n in (5, 6, 7)], 3),
        ([torch.zeros(3, n) for n in (5, 6)], 2),
        ([None, 1, "a"], 3),
        ({"x": torch.zeros(4), "names": ["a", None, "b", "c"], "num_items": 4}, 4),
    ],
)
def test_lists_of_samples_are_divided(batch: Any, num_samples: int) -> None:
    assert row_obstacle(batch, num_samples) is None
    part = select_rows(batch, slice(1, 2), num_samples)
    assert type(part) is type(batch)
