"""The codec of states: any structure comes back with its types, its bits and its sharing."""

import collections
import enum
import io
import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whet.checkpoint.encoding import as_bytes, decode_tensors, dump_json, encode_tensors, load_json
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import NotEncodableError, StateEncoder
from whet.checkpoint.state_json import decode_state, encode_state

pytestmark = pytest.mark.torch

Pair = collections.namedtuple("Pair", "first second")


class Point(NamedTuple):
    x: float
    y: float

    def total(self) -> float:
        return self.x + self.y


class Phase(enum.Enum):
    WARMUP = enum.auto()


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    TRAIN = "train"


def through_disk(value: Any, live: dict[str, Tensor] | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Return the decoded value and the tensors of the file, by way of the bytes of both files."""
    encoder = StateEncoder(live)
    encoded = encoder.encode(value, "state/x")
    tensors = encoder.finish()
    read = decode_tensors(bytearray(b"".join(bytes(part) for part in encode_tensors(tensors))))
    json = load_json(dump_json({"value": encoded}))["value"]
    return StateDecoder(read, live=live).decode(json), tensors


PLAIN = [
    None, True, 1, 2**60 + 1, -(2**200), -0.0, math.inf, -math.inf, "", "a/b\ud800", [], (), {}, [1, [2]], (1, (2,)),
    {"b": 1, "a": 2}, {1: 2, "1": 3, (1, 2): 4, None: 5}, {"$": 1}, {"$order": [1]}, {1, 2}, frozenset("a"), b"\0",
    bytearray(b"x"), 1 + 2j, np.float32(1.1), np.float64(1.1), np.int8(3), np.bool_(True), np.datetime64("2020-01-01"),
    collections.OrderedDict(b=1, a=2), collections.deque([1, 2], maxlen=3), collections.Counter("aab"),
    collections.defaultdict(list, {1: [2]}), torch.Size([1, 2]), torch.float16, torch.device("cpu"), range(1, 5, 2),
    slice(1, None), Pair(1, [2]), Point(1.0, 2.0), Phase.WARMUP, Level.LOW, [Mode.TRAIN],
    [1.5, math.inf], {"a": -math.inf},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_a_value_keeps_its_type_and_its_order(value: Any) -> None:
    for got in (through_disk(value)[0], decode_state(encode_state(value))):
        assert got == value
        assert type(got) is type(value)
        assert math.copysign(1, got) == math.copysign(1, value) if type(value) is float else True
        assert list(got) == list(value) if isinstance(value, dict) else True


def test_nan_and_files_in_memory() -> None:
    assert math.isnan(through_disk(math.nan)[0])
    file = io.BytesIO(b"abc")
    file.seek(1)
    assert through_disk(file)[0].read() == b"bc"


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array("ab"), np.zeros((0, 3)), np.array(3.5)],
    ids=str,
)
def test_an_array_keeps_its_dtype_and_order(array: np.ndarray) -> None:
    got, _ = through_disk(array)
    assert (got.dtype, got.shape, got.flags.f_contiguous) == (array.dtype, array.shape, array.flags.f_contiguous)
    assert np.array_equal(got, array)
    assert got.flags.writeable


def test_a_generator_continues_its_draws() -> None:
    ours = torch.Generator().manual_seed(4)
    torch.rand(5, generator=ours)
    got, _ = through_disk(ours)
    assert torch.equal(torch.rand(4, generator=got), torch.rand(4, generator=ours))
    for bits in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        numpy = np.random.Generator(getattr(np.random, bits)(3))
        numpy.integers(5, dtype=np.uint8)
        assert through_disk(numpy)[0].random() == numpy.random()
    legacy, python = np.random.RandomState(3), random.Random(3)
    legacy.randn(), python.gauss(0, 1)
    assert through_disk(legacy)[0].randn() == legacy.randn()
    assert through_disk(python)[0].gauss(0, 1) == python.gauss(0, 1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int64,
        torch.uint64,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
    ],
    ids=str,
)
def test_a_tensor_of_any_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 2.0, 4.0]).to(dtype)
    got, _ = through_disk(tensor)
    assert got.dtype == dtype
    assert bytes(as_bytes(got)) == bytes(as_bytes(tensor))
    big = torch.tensor(2**60 + 1)
    assert int(through_disk(big)[0]) == int(decode_state(encode_state(big))) == 2**60 + 1


def test_sharing_with_the_model_and_within_the_state_is_kept() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    moment = torch.randn(3)
    state = {"weight": weight, "data": weight.data, "row": weight.data[1], "turned": weight.data.t()}
    state |= {"a": moment, "b": moment, "view": moment.view(3), "list": [moment]}
    got, tensors = through_disk(state, {"model/w": weight})
    assert list(tensors) == ["state/x.a"]
    assert got["weight"] is weight
    assert got["b"] is got["a"] is got["list"][0]
    assert got["view"] is not got["a"]
    with torch.no_grad():
        weight.fill_(7)
        got["a"].fill_(5)
    assert got["data"].sum() == 84
    assert got["row"].tolist() == [7, 7, 7]
    assert got["turned"].stride() == (1, 3)
    assert got["view"].tolist() == [5, 5, 5]


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    base = torch.arange(10.0)
    (first, second), tensors = through_disk([base[2:5], base[3:8]])
    first[1] = -1
    assert second[0] == -1
    assert len(tensors) == 1
    expanded, tensors = through_disk(torch.ones(1).expand(10))
    assert (expanded.stride(), expanded.shape) == ((0,), (10,))
    flat = torch.randn(12)
    live = {"model/a": nn.Parameter(flat[:8].view(2, 4)), "model/b": nn.Parameter(flat[8:])}
    got, _ = through_disk(flat, live)
    assert got.data_ptr() == live["model/a"].data_ptr()
    assert torch.equal(got, flat)
    assert through_disk(torch.randn(3, 4).t())[0].stride() == (1, 4)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_sparse_tensors_keep_their_layout() -> None:
    coo = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (3,))
    got, _ = through_disk(coo)
    assert not got.is_coalesced()
    assert torch.equal(got._values(), coo._values())
    for layout in (torch.sparse_csr, torch.sparse_csc):
        got, _ = through_disk(torch.eye(3).to_sparse(layout=layout))
        assert got.layout == layout
        assert torch.equal(got.to_dense(), torch.eye(3))


def test_equal_paths_are_told_apart() -> None:
    got, _ = through_disk({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)})
    assert (got["a"]["b"], got["a.b"]) == (1, 0)


def test_the_versions_of_modules_are_kept() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    assert through_disk(state)[0]._metadata == state._metadata


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, print]}, "state/x.a.1 is a builtin"),
        ({"a": nn.Linear(1, 1)}, "state/x.a is a Linear"),
        (torch.empty(2, device="meta"), "state/x is a Tensor on the meta device"),
        (np.array([object()]), "state/x is a ndarray of object"),
    ],
    ids=["a function", "a module", "a meta tensor", "objects"],
)
def test_what_has_no_encoding_is_named(value: Any, where: str) -> None:
    encoder = StateEncoder()
    with pytest.raises(NotEncodableError, match=where):
        encoder.encode(value, "state/x")
    assert encoder.finish() == {}


def test_a_list_inside_of_itself_is_refused() -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    encoder = StateEncoder()
    with pytest.raises(NotEncodableError, match="inside itself"):
        encoder.encode(endless, "state/x")
    assert encoder.finish() == {}, "tensors of an incomplete state must not be saved"


def test_saving_does_not_pin_the_memory_of_a_tensor() -> None:
    """NumPy's view of a tensor would make its memory impossible to resize: observers resize their buffers."""
    tensor = torch.ones(3)
    assert bytes(as_bytes(tensor)) == np.ones(3, dtype=np.float32).tobytes()
    tensor.resize_(1000)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "unknown"},
        {"$": "dtype", "name": "os"},
        {"$order": ["a"], "b": 1},
        {"$": "same", "of": "nothing"},
        {"$": "subclass", "class": "os:system", "parts": {}, "metadata": None, "shape": [], "stride": []},
    ],
    ids=str,
)
def test_a_hostile_encoding_is_refused(encoded: Any) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        decode_state(encoded)


def test_a_view_beyond_its_memory_is_refused() -> None:
    view = {"$": "view", "of": "model/w", "path": "v", "dtype": "F32", "shape": [99], "stride": [1], "offset": 0}
    view["base_stride"] = [1]
    with pytest.raises(ValueError, match="beyond the memory"):
        StateDecoder({}, live={"model/w": torch.ones(3)}).decode(view)


def test_a_class_inside_of_a_function_is_refused_or_rebuilt() -> None:
    class Local(enum.Enum):
        ONE = 1

    class Place(NamedTuple):
        row: int

    with pytest.raises(NotEncodableError, match="not found by its name"):
        encode_state(Local.ONE)
    encoded = encode_state(Place(3))
    got = decode_state(encoded)
    assert (got.row, got._fields) == (3, ("row",))
    assert encode_state(got) == encoded
