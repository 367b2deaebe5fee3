"""The walk over the state of user code: what it finds, what it leaves out, and how it names it."""

import argparse
import array
import contextlib
import csv
import functools
import hashlib
import io
import itertools
import logging
import math
import mmap
import multiprocessing
import operator
import queue
import random
import sqlite3
import struct
import sys
import threading
import time
import types
import weakref
import zlib
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from whet.verify.drawing_functions import draws
from whet.verify.hidden_state import StateWalk, changed_names, reachable

pytestmark = pytest.mark.torch


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def digests(value: Any, **options: Any) -> dict[str, bytes]:
    walk = StateWalk(**options)
    walk.walk(value, "x")
    return walk.finish()


def change(value: Any, act: Callable[[], Any], **options: Any) -> list[str]:
    before = digests(value, **options)
    assert changed_names(before, digests(value, **options)) == [], "a walk changes nothing"
    act()
    return changed_names(before, digests(value, **options))


def _tensor_data() -> tuple[Any, Any]:
    tensor = torch.zeros(300, 300)
    return tensor, lambda: tensor.data.add_(1)


def _pair(value: Any, act: Callable[[Any], Any]) -> tuple[Any, Any]:
    return value, lambda: act(value)


def _closure() -> tuple[Any, Any]:
    inner = [1]
    return (lambda: inner), lambda: inner.append(2)


def _nested() -> tuple[Any, Any]:
    inner = {"a": 1}

    def outer() -> Any:
        return lambda: inner

    return outer, lambda: inner.update(a=2)


_KEPT = Plain(count=0)


class Ring(list[float]):
    place = 0


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        calls[0] += 1
        return function(*args)

    return wrapper


PROPERTY, MADE = [0], [0]


class CounterMeta(type):
    made = 0

    def __next__(cls) -> int:
        CounterMeta.made += 1
        return CounterMeta.made


class Counters(metaclass=CounterMeta):
    """State behind decorators, properties, class methods, nested classes and a metaclass."""

    norm = nn.BatchNorm1d(2, affine=False)

    class Config:
        tau = 1

    @_counted
    def method(self) -> None:
        pass

    @property
    def value(self) -> int:
        PROPERTY[0] += 1
        return PROPERTY[0]

    @classmethod
    def make(cls) -> None:
        MADE[0] += 1

    @functools.cache  # noqa: B019
    def drawn(self, number: int) -> float:
        return random.random() * number


@pytest.fixture
def library_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "calls", 0, raising=False)
    monkeypatch.setattr(nn.Linear, "calls", 0, raising=False)


def _uses_libraries() -> Any:
    return math.calls + nn.Linear.calls


def _loader() -> DataLoader[Any]:
    return DataLoader([1.0, 2.0], shuffle=True, generator=torch.Generator())


def _two_closures() -> tuple[Any, Any]:
    def make() -> tuple[Callable[[], int], list[int]]:
        count = [0]
        return (lambda: count[0]), count

    first, counted = make()
    second, _ = make()
    return [first, second], lambda: counted.__setitem__(0, 1)


class Other:
    """Differs from an empty Plain only in its class."""

    text = "new"


_OTHER, _WEIGHT, _TWO = Plain(count=0), torch.ones(1), ["x[0]", "x[1]"]


def _primed() -> Iterator[int]:
    def inner() -> Iterator[int]:
        for place in range(9):
            yield place + 1

    def outer() -> Iterator[int]:
        yield from inner()

    generator = outer()
    next(generator)
    return generator


def _counts_by_text() -> None:
    globals()["PROPERTY"] = [PROPERTY, 0]


def _database() -> Any:
    database = sqlite3.connect(":memory:")
    database.execute("create table t (n int)")
    return database


class Counted(nn.Module):
    calls: int

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Level(Enum):
    LOW = 1

    def __init__(self, _: int) -> None:
        self.calls = 0


class Whole(int):
    pass


class Indexed:
    def __getitem__(self, index: int) -> int:
        return index


class Private:
    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def count(self) -> None:
        self.__calls += 1


def _bound_method() -> tuple[Any, Any]:
    """Only a method of the list is referred to, not the list."""
    seen: list[int] = []
    return seen.append, lambda: seen.append(1)


def _view() -> tuple[Any, Any]:
    table = {"a": 1}
    return table.values(), lambda: table.update(a=2)


def _reads_annotations() -> None:
    Plain.__annotations__["n"] = len(Plain.__annotations__)
    Plain.__annotations__[str(len(Plain.__annotations__))] = int


BAR = tqdm(total=9, file=io.StringIO())
VIEW = np.zeros(4)[:0]


def _reads_a_bar() -> int:
    BAR.update(1)
    return int(BAR.n)


def _reads_the_base() -> None:
    VIEW.base[3] += 1


def _proxied() -> list[Any]:
    """A proxy of an object, and one of an object that is gone."""
    return [weakref.proxy(_KEPT), weakref.proxy(Plain())]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: _pair([1, [2]], lambda v: v[1].append(3)), ["x[1]"]),
        (lambda: _pair({"a": 1, (1, 2): 2}, lambda v: v.update(a=5)), ["x['a']"]),
        (lambda: _pair({"a": 1}, lambda v: v.pop("a")), ["x"]),
        (lambda: _pair({1, 2}, lambda v: v.add(3)), ["x"]),
        (lambda: _pair({"a"}, lambda v: (v.add("b"), v.remove("a"))), ["x"]),
        (lambda: _pair(deque([1], maxlen=1), lambda v: v.append(2)), ["x[0]"]),
        (lambda: _pair(defaultdict(int), lambda v: v["a"]), ["x"]),
        (lambda: _pair(OrderedDict(a=1), lambda v: v.update(a=2)), ["x['a']"]),
        (lambda: _pair(list(range(10_000)), lambda v: v.append(0)), ["x"]),
        (lambda: _pair(list(range(10_000)), lambda v: v.__setitem__(5_000, 0)), ["x"]),
        (lambda: _pair({str(n): n for n in range(200_000)}, lambda v: v.update({"100000": 0})), ["x"]),
        (lambda: _pair(deque(range(10_000)), lambda v: v.__setitem__(5_000, 0)), ["x"]),
        (lambda: _pair({*range(10_000)}, lambda v: (v.remove(5_000), v.add(-1))), ["x"]),
        (lambda: _pair(torch.zeros(1_000_003), lambda v: v[500_001].add_(1)), ["x"]),
        (lambda: _pair(torch.arange(1_000_003)[1:], lambda v: v[[7, 8]].sort(descending=True)), []),
        (lambda: _pair(torch.arange(1_000_003)[1:], lambda v: v.data[5:9].copy_(v[5:9].flip(0))), ["x"]),
        (lambda: _pair(torch.zeros(2_000, 2_000).t(), lambda v: v[1_001, 777].add_(1)), ["x"]),
        (lambda: _pair(np.zeros(1_000_003), lambda v: v.__setitem__(500_001, 1)), ["x"]),
        (lambda: _pair(types.SimpleNamespace(n=0), lambda v: vars(v).update(n=1)), ["x.n"]),
        (lambda: _pair(argparse.Namespace(n=0), lambda v: vars(v).update(n=1)), ["x.n"]),
        (lambda: _pair(UserDict(n=0), lambda v: v.update(n=1)), ["x.data['n']"]),
        (lambda: _pair(ChainMap({}, {"n": 0}), lambda v: v.update(n=1)), ["x.maps[0]"]),
        (lambda: _pair(array.array("i", [0]), lambda v: v.__setitem__(0, 1)), ["x"]),
        (lambda: _pair(io.StringIO(), lambda v: v.write("a")), ["x"]),
        (lambda: _pair(queue.SimpleQueue(), lambda v: v.put(1)), ["x"]),
        (lambda: _pair(queue.Queue(), lambda v: v.queue.append(1)), ["x.queue"]),
        (lambda: _pair(ContextVar("n", default=0), lambda v: v.set(1)), ["x.get()"]),
        (lambda: _pair(threading.local(), lambda v: vars(v).update(n=1)), ["x.n"]),
        (lambda: _pair(weakref.WeakKeyDictionary({_KEPT: 0}), lambda v: v.update({_KEPT: 1})), ["x[Plain 0]"]),
        (lambda: _pair(weakref.WeakSet(), lambda v: v.add(_KEPT)), ["x"]),
        (lambda: _pair([Fraction(1, 3), Decimal(1)], lambda v: v.__setitem__(0, Fraction(1, 4))), ["x[0]"]),
        (lambda: _pair(functools.cache(lambda n: random.random()), lambda v: v(1)), ["x"]),
        (lambda: _pair(functools.cache(lambda n: n + 1), lambda v: v(1)), []),
        (lambda: _pair(_proxied(), lambda v: v[0].__setattr__("count", 1)), ["x[0].count"]),
        (lambda: _pair([weakref.ref(_KEPT)], lambda v: setattr(_KEPT, "count", _KEPT.count + 1)), ["x[0]().count"]),
        (lambda: _pair(torch.zeros(3), lambda v: v.add_(1)), ["x"]),
        (lambda: _pair(torch.zeros(100, 70).t(), lambda v: v.add_(1)), ["x"]),
        (lambda: _pair(torch.zeros(2000, 70).t(), lambda v: v.add_(1)), ["x"]),
        (lambda: _pair(torch.zeros((), dtype=torch.bfloat16), lambda v: v.add_(1)), ["x"]),
        (lambda: _pair(torch.zeros(3, dtype=torch.complex64), lambda v: v.add_(1)), ["x"]),
        (_tensor_data, ["x"]),
        (lambda: _pair(np.zeros(3), lambda v: v.__setitem__(0, 1)), ["x"]),
        (lambda: _pair(np.zeros((400, 400)).T, lambda v: v.fill(1)), ["x"]),
        (lambda: _pair(torch.Generator(), lambda v: torch.rand(1, generator=v)), ["x"]),
        (lambda: _pair(np.random.default_rng(0), lambda v: v.random()), ["x"]),
        (lambda: _pair(np.random.RandomState(0), lambda v: v.rand()), ["x"]),
        (lambda: _pair(random.Random(0), lambda v: v.random()), ["x"]),
        (lambda: _pair(itertools.count(), next), ["x"]),
        (lambda: _pair(iter([1, 2]), next), ["x"]),
        (lambda: _pair((n for n in range(9)), next), ["x"]),
        (lambda: _pair(Plain(a=Plain(b=1)), lambda v: setattr(v.a, "b", 2)), ["x.a.b"]),
        (lambda: _pair(Slotted(), lambda v: setattr(v, "count", 1)), ["x.count"]),
        (lambda: _pair(nn.BatchNorm1d(2), lambda v: v(torch.ones(3, 2))), ["x.running_mean", "x.running_var"]),
        (lambda: _pair(nn.Dropout(0.1), lambda v: setattr(v, "p", 0.2)), ["x.p"]),
        (lambda: _pair(functools.partial(print, [1]), lambda v: v.args[0].append(2)), ["x.args[0]"]),
        (_closure, ["inner"]),
        (_nested, ["inner['a']"]),
        (lambda: _pair(OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")), ["x"]),
        (lambda: _pair(torch.zeros(3), lambda v: v.requires_grad_()), ["x"]),
        (lambda: _pair(np.array([1, [0]], dtype=object), lambda v: v[1].append(2)), ["x[1]"]),
        (lambda: _pair(memoryview(bytearray(2)), lambda v: v.__setitem__(0, 1)), ["x"]),
        (lambda: _pair(multiprocessing.Value("i", 0), lambda v: setattr(v, "value", 1)), ["x"]),
        (lambda: _pair(Ring([1.0]), lambda v: setattr(v, "place", 1)), ["x.place"]),
        (lambda: _pair(_loader(), lambda v: next(iter(v))), ["x.generator"]),
        (lambda: _pair(Counters(), lambda v: v.method()), ["calls[0]"]),
        (lambda: _pair(Counters(), lambda v: v.value), ["PROPERTY[0]"]),
        (lambda: _pair(Counters, lambda v: v.make()), ["MADE[0]"]),
        (lambda: _pair(Counters(), lambda v: setattr(v.Config, "tau", v.Config.tau + 1)), ["Counters.Config.tau"]),
        (
            lambda: _pair(Counters(), lambda v: v.norm.running_mean.add_(1)),
            ["Counters.norm.running_mean"],
        ),
        (lambda: _pair(Counters(), lambda v: v.drawn(1)), ["Counters.drawn"]),
        (lambda: _pair(Counters, lambda v: next(v)), ["CounterMeta.made"]),
        (lambda: _pair(_uses_libraries, lambda _: setattr(math, "calls", math.calls + 1)), ["math.calls"]),
        (lambda: _pair(_uses_libraries, lambda _: setattr(nn.Linear, "calls", 9)), ["nn.Linear.calls"]),
        (_two_closures, ["count[0]"]),
        (lambda: _pair(np.random.PCG64(0), lambda v: v.random_raw()), ["x"]),
        (lambda: _pair(np.random.SeedSequence(0), lambda v: v.spawn(1)), ["x"]),
        (lambda: _pair(np.random.default_rng(0), lambda v: v.spawn(1)), ["x"]),
        (lambda: _pair(mmap.mmap(-1, 8), lambda v: v.write_byte(1)), ["x"]),
        (lambda: _pair(_database(), lambda v: v.execute("insert into t values (1)")), ["x"]),
        (lambda: _pair({"f": operator.itemgetter(0)}, lambda v: v.update(f=operator.itemgetter(1))), ["x['f'][1][0]"]),
        (lambda: _pair([torch.device("cpu"), torch.int8], lambda v: v.__setitem__(1, torch.int16)), ["x[1]"]),
        (lambda: _pair([math.sin], lambda v: v.__setitem__(0, math.cos)), ["x[0]"]),
        (lambda: _pair([torch.tanh, nn.ReLU], lambda v: v.__setitem__(slice(2), [torch.relu, nn.GELU])), _TWO),
        (lambda: _pair([_closure, math], lambda v: v.__setitem__(slice(2), [_nested, random])), _TWO),
        (lambda: _pair([Plain()], lambda v: v.__setitem__(0, Other())), ["x[0]", "Other.text"]),
        (lambda: _pair(Ring, lambda v: setattr(v, "append", lambda *_: None)), ["x.append"]),
        (lambda: _pair([_KEPT, _OTHER, _KEPT], lambda v: v.__setitem__(2, _OTHER)), ["x[2]"]),
        (lambda: _pair(torch.ones(2, requires_grad=True), lambda v: v.sum().backward()), ["x.grad"]),
        (lambda: _pair(_primed(), next), ["x.gi_yieldfrom.place"]),
        (lambda: _pair(_counts_by_text, lambda v: v()), ["PROPERTY"]),
        (lambda: _pair(functools.cache(lambda n: float(_WEIGHT) * n), lambda v: v(1)), ["x"]),
        (lambda: _pair(contextlib.ExitStack(), lambda v: v.callback(int)), ["x._exit_callbacks"]),
        (lambda: _pair(ET.Element("a", n="1"), lambda v: v.set("n", "2")), ["x['attrib']['n']"]),
        (lambda: _pair(threading.Event(), lambda v: v.set()), ["x._flag"]),
        (lambda: _pair(threading.Lock(), lambda v: v.acquire()), ["x"]),
        (lambda: _pair(hashlib.sha256(), lambda v: v.update(b"a")), ["x"]),
        (lambda: _pair(logging.Logger("a"), lambda v: v.isEnabledFor(10)), []),
        (lambda: _pair(logging.Logger("a"), lambda v: setattr(v, "calls", 1)), ["x.calls"]),
        (lambda: _pair(Level.LOW, lambda v: setattr(v, "calls", v.calls + 1)), ["x.calls"]),
        (lambda: _pair(Whole(3), lambda v: setattr(v, "calls", 1)), ["x.calls"]),
        (lambda: _pair(ValueError([0]), lambda v: v.args[0].append(1)), ["x.args[0]"]),
        (lambda: _bound_method(), ["x"]),
        (lambda: _view(), ["x['a']"]),
        (lambda: _pair({Plain(n=0)}, lambda v: setattr(next(iter(v)), "n", 1)), ["list(x)[0].n"]),
        (lambda: _pair({(Plain(n=0),): 1}, lambda v: setattr(next(iter(v))[0], "n", 1)), ["list(x)[0][0].n"]),
        (lambda: _pair(iter(Indexed()), next), ["x[1]"]),
        (lambda: _pair(struct.iter_unpack("b", b"abc"), next), ["x"]),
        (lambda: _pair(Private(), lambda v: v.count()), ["x._Private__calls"]),
        (lambda: _pair(_reads_annotations, lambda v: v()), ["Plain.__annotations__"]),
        (lambda: _pair(_reads_a_bar, lambda v: v()), ["BAR.n"]),
        (lambda: _pair(_reads_the_base, lambda v: v()), ["VIEW.base"]),
    ],
)
@pytest.mark.usefixtures("library_attributes")
def test_a_change_is_named(make: Callable[[], tuple[Any, Any]], expected: list[str]) -> None:
    value, act = make()
    assert [name for name in change(value, act) if "x.num_batches" not in name] == expected


def _counts_references() -> int:
    return sys.getrefcount(_KEPT)


@pytest.mark.parametrize(
    "value",
    [
        csv.reader(io.StringIO("a")),
        zlib.compressobj(),
        np.zeros(3).flat,
        zip([1], [2], strict=False),
        _counts_references,
    ],
)
def test_what_cannot_be_read_is_named(value: Any) -> None:
    walk = StateWalk()
    walk.walk(value, "x")
    assert list(walk.partial) == ["getrefcount" if value is _counts_references else "x"]


@functools.lru_cache
def _table(size: int) -> list[torch.Tensor]:
    return [torch.ones(size)]


def _fills() -> None:
    _table(3)


def _changes() -> None:
    _table(3)[0].add_(1)


def test_what_a_cached_function_returned_is_state_once_it_exists() -> None:
    _table.cache_clear()
    assert change(_fills, _fills) == []
    assert change(_changes, _changes) == ["_table(...)[0]"]
    walk = StateWalk()
    walk.walk([_table, csv.writer(io.StringIO())], "x")
    assert walk.partial == {}


def _dropped(size: int) -> torch.Tensor:
    return nn.functional.dropout(torch.ones(size), 0.3)


def _dropped_deeply(size: int) -> torch.Tensor:
    return _dropped(size)


class _Tools:
    def __init__(self, size: int) -> None:
        self.layer = nn.Linear(size, size)

    @staticmethod
    @functools.cache
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size).bernoulli_()

    def noise(self, size: int) -> torch.Tensor:
        return torch.empty(size).cauchy_()


_TOOLS = _Tools(1)


@pytest.mark.parametrize(
    "function",
    [
        functools.cache(lambda size: _dropped(size)),
        functools.cache(lambda size: _dropped_deeply(size)),
        functools.cache(lambda size: _Tools.mask(size)),
        functools.cache(lambda size: _TOOLS.noise(size)),
        functools.cache(lambda size: _Tools(size)),
        functools.cache(lambda size: torch.poisson(torch.ones(size))),
        functools.cache(lambda size: nn.init.trunc_normal_(torch.empty(size))),
        functools.cache(lambda size: _gauss(size, 1)),
        functools.cache(lambda size: nn.Linear(size, 1)),
    ],
)
def test_a_cache_of_random_numbers_is_named(function: Any) -> None:
    assert "x" in change(function, lambda: function(3))


_gauss = random.gauss


def _shape(size: int) -> torch.Tensor:
    started = time.perf_counter()
    operand = next(iter([torch.ones(size)]))
    assert time.perf_counter() >= started
    return nn.init.zeros_(operand)


def test_a_cache_of_a_computation_is_left_out() -> None:
    function = functools.cache(lambda size: _shape(size))
    assert change(function, lambda: function(3)) == []


def test_all_random_operators_of_torch_are_known() -> None:
    """Except recurrent and attention kernels, which draw only if they are given a dropout rate."""
    tag = torch.Tag.nondeterministic_seeded
    names = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas() if "::" in schema.name}
    packets = {name: getattr(torch.ops.aten, name, None) for name in names if not name.startswith("_")}
    operators = {
        name
        for name, packet in packets.items()
        if packet is not None and any(tag in getattr(packet, o).tags for o in packet.overloads())
    }
    kernels = {"gru", "lstm", "rnn_relu", "rnn_tanh", "miopen_rnn", "scaled_dot_product_attention"}
    assert {"dropout", "normal_"} < operators
    assert {name for name in operators - kernels if not draws(eval(f"lambda x: x.{name}()"))} == set()


def _boosts(layer: nn.Module) -> Callable[[], None]:
    def boost() -> None:
        kind: Any = type(layer)
        kind.calls += 1

    return boost


@pytest.mark.usefixtures("library_attributes")
def test_an_attribute_of_a_library_class_that_code_reaches_by_its_type_is_named() -> None:
    layer = nn.Linear(1, 1)
    known = {id(layer): layer}
    boost = _boosts(layer)
    assert change(boost, boost, known=known) == ["Linear.calls"]


class _Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activate: Any = nn.functional.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(x)


def test_a_function_of_torch_that_is_exchanged_is_one_change() -> None:
    model = _Activated()
    assert change(model, lambda: setattr(model, "activate", torch.sin)) == ["x.activate"]


_RATES = np.random.default_rng(0)


@torch.library.custom_op("whet_tests::half", mutates_args=())
def _half(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@torch.library.custom_op("whet_tests::noisy", mutates_args=())
def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x * _RATES.random()


@_noisy.register_kernel("cpu")
def _noisy_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x * _RATES.random()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: _half(torch.ones(1)), []),
        (lambda: torch.ops.whet_tests.half(torch.ones(1)), []),
        (lambda: _noisy(torch.ones(1)), ["_RATES"]),
        (lambda: torch.ops.whet_tests.noisy(torch.ones(1)), ["_RATES"]),
    ],
)
def test_only_the_users_part_of_an_operator_is_compared(function: Callable[[], Any], expected: list[str]) -> None:
    # The operator and its overload are objects too.
    packet = torch.ops.whet_tests.half if expected == [] else torch.ops.whet_tests.noisy
    for value in (function, packet, packet.default):
        walk = StateWalk()
        walk.walk(value, "x")
        assert change(value, function) == expected
        assert walk.partial == {}


class _Scaled:
    def __init__(self) -> None:
        self.scale = 1.0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_the_compiler_is_not_entered() -> None:
    """It counts, caches and tags while it compiles. What it compiles is the user's."""
    layer, scaled = nn.Linear(2, 2), _Scaled()
    compiled = torch.compile(layer, backend="eager")
    attributes = [value for key, value in vars(compiled).items() if not key.startswith("_")]
    values = [attributes, torch.compile(scaled.apply, backend="eager")]
    assert change(values, lambda: (compiled(torch.ones(1, 2)), values[1](torch.ones(2)))) == []
    assert change(values, lambda: setattr(scaled, "scale", 2.0)) == ["self.scale"]


def test_a_replaced_function_of_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def tangent() -> float:
        return math.tan(1.0)

    assert change(tangent, lambda: monkeypatch.setattr(math, "tan", math.sin)) == ["math.tan"]


def test_a_bar_is_left_out_if_no_code_reads_its_position() -> None:
    assert change(lambda: BAR.update(1), lambda: BAR.update(1)) == []


def test_an_attribute_of_torchscript_is_state() -> None:
    # A FutureWarning since torch 2.15.
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        module: Any = torch.jit.script(Counted())
    assert change(module, lambda: module(torch.ones(1))) == ["x.calls"]


def test_a_file_that_is_read_is_state_and_a_log_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("1\n2\n")
    with path.open() as lines, (tmp_path / "log.txt").open("w") as log:
        assert change([lines, log], lambda: (lines.readline(), log.write("a"), log.flush())) == ["x[0]"]


def test_a_written_file_whose_position_is_asked_for_is_state(tmp_path: Path) -> None:
    log, both = (tmp_path / "log.txt").open("w"), (tmp_path / "both").open("w+b")
    raw = (tmp_path / "raw").open("wb", buffering=0)

    def count() -> int:
        log.write("a")
        raw.write(b"a")
        return log.tell() + both.write(b"a")

    with log, both, raw:
        assert change(count, count) == ["both", "log", "raw"]
    assert change(count, lambda: None) == []


@pytest.mark.parametrize(
    "value",
    [random, random.random, np.random.rand, torch.rand, torch.default_generator, torch.nn.functional.dropout, len, int],
)
def test_global_generators_and_libraries_are_left_out(value: Any) -> None:
    def draw() -> None:
        random.random()
        np.random.rand()
        torch.rand(1)

    assert change(value, draw) == []


def test_what_is_known_is_not_entered() -> None:
    inner = [1]
    value = {"inner": inner, "other": 1}
    assert change(value, lambda: inner.append(2), known=reachable([{"mine": inner}])) == []


def test_cycles_depth_and_size_are_bounded() -> None:
    ring: list[Any] = []
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert digests(ring)
    assert digests(deep)
    assert len(digests([Plain(**{f"a{n}": [0] * 50 for n in range(100)}) for _ in range(100)])) < 50_000


def test_no_storage_is_exported() -> None:
    """A tensor whose memory NumPy has seen can no longer be resized."""
    tensor = torch.zeros(3)
    assert digests(tensor)
    # torch refuses this for a tensor whose memory it has handed out.
    assert tensor.resize_(100).shape == (100,)


def test_no_code_of_the_user_is_called() -> None:
    """Each method records its call: an error alone would be taken for an object that cannot be read."""
    calls: list[str] = []

    class Hostile:
        def __getattr__(self, name: str) -> Any:
            calls.append(f"__getattr__({name})")
            raise AttributeError(name)

        def __len__(self) -> int:
            calls.append("__len__")
            return 0

        def __eq__(self, other: object) -> bool:
            calls.append("__eq__")
            return True

        __hash__ = None  # type: ignore[assignment]

        @property
        def value(self) -> int:
            calls.append("value")
            return 0

    first, second = Hostile(), Hostile()
    first.inner = [1]
    value = {"a": first, "b": [second]}
    assert change(value, lambda: vars(first)["inner"].append(2)) == ["x['a'].inner"]
    assert calls == []


def test_what_cannot_be_read_is_left_out() -> None:
    class Table(Mapping[int, int]):
        """Reading an item counts as a use, or fails."""

        def __init__(self) -> None:
            self.uses = 0

        def __getitem__(self, key: int) -> int:
            self.uses += 1
            raise OSError("the file is closed")

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("the file is closed")

    table, gone = Table(), Plain()
    proxy = weakref.proxy(gone)
    del gone
    value = {"table": table, "proxy": proxy, "broken": Broken([1]), "last": 5}
    assert change(value, lambda: value.update(last=6)) == ["x['last']"]
    assert table.uses == 0


@pytest.mark.parametrize(("package", "is_walked"), [("einops._backends", False), ("mine._backends", True)])
def test_caches_of_libraries_that_do_not_affect_results_are_left_out(package: str, is_walked: bool) -> None:
    namespace: dict[str, Any] = {"__name__": package, "_loaded": {"torch": 1}}
    exec("def get_backend():\n    return _loaded", namespace)
    walk = StateWalk()
    walk.walk(namespace["get_backend"], "get_backend")
    assert any("_loaded" in name for name in walk.digests) is is_walked


def test_iterators_that_do_not_tell_how_far_they_are_are_named() -> None:
    walk = StateWalk()
    walk.walk([itertools.chain([1], [2]), itertools.cycle("ab"), zip([1], [2], strict=True), itertools.count()], "x")
    assert list(walk.partial) == ["x[0]", "x[1]", "x[2]"]


def test_what_was_compared_in_part_is_named() -> None:
    walk = StateWalk()
    walk.walk({"plain": list(range(10_000)), "objects": [Plain() for _ in range(10_000)]}, "x")
    assert list(walk.partial) == ["x['objects']"]
    sample = StateWalk(is_sample=True)
    sample.walk([Plain() for _ in range(10_000)], "x")
    assert not sample.partial
