"""Separate streams of random numbers for training steps and for the code between them.

Code between steps may sample text, shuffle data or evaluate with random numbers. These draws must not affect the draws
of later steps, so the generators are switched at the start and end of each step. A generator is switched only after
code between steps has drawn from it, because switching all of them would take longer than the rest of whet's work in a
step.
"""

import ctypes
import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice

_PREFIX, _BETWEEN = "rng/", "rng/between/"
"""Prefixes of the tensor names of the two streams in a checkpoint."""


class RandomStreams:
    """The generator states of both streams: steps, and the code between them."""

    def __init__(self, device: AbstractDevice, *, between_seed: int) -> None:
        """Start the stream of steps with the current generator states.

        `between_seed` seeds the stream of the code between steps.
        """
        self._device = device
        self._between_seed = between_seed
        self._generators: dict[str, _AbstractGenerator] = {
            "torch": _TorchGenerator(torch.default_generator),
            "python": _PythonGenerator(),
            "numpy": _NumpyGenerator(),
        }
        if device.generator is not None:
            self._generators[device.kind] = _TorchGenerator(device.generator)
        self._is_in_step = False
        self._steps: dict[str, tuple[bytes, Any]] = {}
        """Fingerprint and state of each generator after the last step."""
        self._between: dict[str, Any] = {}
        """States of the stream between steps, for generators from which code between steps has drawn."""
        self._marks: dict[str, bytes] = {}
        """Fingerprints when the last step was left. If one differs, code between steps has drawn since then."""
        self._note_states()

    def enter_step(self) -> None:
        """Switch the global generators to the stream of steps."""
        self._is_in_step = True
        for name, generator in self._generators.items():
            has_drawn = generator.fingerprint() != self._marks[name]
            if has_drawn:
                # The first draws between steps still came from the stream of steps. Start a separate stream after them.
                is_first = name not in self._between
                self._between[name] = generator.seeded(self._between_seed) if is_first else generator.get()
            if has_drawn or name in self._between:
                generator.set(self._steps[name][1])

    def leave_step(self) -> None:
        """Save the states of the stream of steps, and switch to the stream of the code between steps."""
        self._is_in_step = False
        for name, generator in self._generators.items():
            mark = generator.fingerprint()
            if mark != self._steps[name][0]:
                self._steps[name] = mark, generator.get()
            if name in self._between:
                generator.set(self._between[name])
                mark = generator.fingerprint()
            self._marks[name] = mark

    def torch_states(self) -> tuple[Tensor, Tensor | None]:
        """Return the current states of torch's CPU generator and of the device's generator, if it has one.

        Copies a state only if something has drawn from the generator since the step was entered.
        """
        states = [self._current(name) for name in ("torch", self._device.kind) if name in self._generators]
        return states[0], states[1] if len(states) > 1 else None

    def _current(self, name: str) -> Any:
        mark, state = self._steps[name]
        generator = self._generators[name]
        return state if self._is_in_step and generator.fingerprint() == mark else generator.get()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of both streams as tensors and plain JSON. The active stream does not change."""
        live = {name: generator.get() for name, generator in self._generators.items()}
        if self._is_in_step:
            steps, between, has_between = live, {**live, **self._between}, bool(self._between)
        else:
            steps, between = {name: state for name, (_, state) in self._steps.items()}, live
            # Code between steps may have drawn for the first time since the last step.
            drawn = (one.fingerprint() != self._marks[name] for name, one in self._generators.items())
            has_between = bool(self._between) or any(drawn)
        tensors, facts = _encode(steps, _PREFIX)
        if not has_between:
            return tensors, {**facts, "between": None}
        between_tensors, between_facts = _encode(between, _BETWEEN)
        return tensors | between_tensors, {**facts, "between": {**between_facts, "names": sorted(self._between)}}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore both streams from a checkpoint. A device's generator is restored only on the same kind of device."""
        self._set(_decode(tensors, facts, _PREFIX))
        self._note_states()
        self._between = {}
        if facts["between"] is None:
            return
        between = _decode(tensors, facts["between"], _BETWEEN)
        self._between = {n: between[n] for n in facts["between"]["names"] if n in self._generators and n in between}
        self._set(between)
        if not self._is_in_step:
            self._marks |= {name: self._generators[name].fingerprint() for name in self._between}
            return
        for name, generator in self._generators.items():
            # Code between steps had drawn for the first time before the capture. Without the interruption, the next
            # `enter_step` would have started its stream.
            if name not in self._between and generator.fingerprint() != self._marks[name]:
                self._between[name] = generator.seeded(self._between_seed)
            generator.set(self._steps[name][1])

    def _set(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if name in self._generators:
                self._generators[name].set(state)

    def _note_states(self) -> None:
        self._steps = {name: (one.fingerprint(), one.get()) for name, one in self._generators.items()}
        self._marks = {name: mark for name, (mark, _) in self._steps.items()}


def _encode(states: Mapping[str, Any], prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the generator states of one stream as tensors, with names that start with `prefix`, and plain JSON."""
    version, words, gauss = states["python"]
    numpy = states["numpy"]
    tensors = {f"{prefix}{name}": state for name, state in states.items() if isinstance(state, Tensor)}
    tensors[f"{prefix}python"] = torch.tensor(words, dtype=torch.int64)
    facts = {"python": {"version": version, "gauss": gauss}}
    if numpy["bit_generator"] != "MT19937":
        # np.random.set_bit_generator accepts any other generator.
        return tensors, {**facts, "numpy": {"state": encode_plain(numpy)}}
    tensors[f"{prefix}numpy"] = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    cached = {"position": numpy["state"]["pos"], "has_gauss": numpy["has_gauss"], "cached": numpy["gauss"]}
    return tensors, {**facts, "numpy": {"name": numpy["bit_generator"], **cached}}


def encode_plain(value: Any) -> Any:
    """Return the state of a NumPy generator as JSON. It consists of dicts, integers and arrays of integers.

    >>> encode_plain({"key": np.array([1, 2], dtype=np.uint64), "inc": 2**100})
    {'key': {'dtype': '<u8', 'items': [1, 2]}, 'inc': 1267650600228229401496703205376}
    """
    if isinstance(value, dict):
        return {key: encode_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "items": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def decode_plain(value: Any) -> Any:
    """Return the state that `encode_plain` encoded."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "items"}:
        return np.array(value["items"], dtype=value["dtype"])
    return {key: decode_plain(item) for key, item in value.items()}


def _decode(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    python, numpy = facts["python"], facts["numpy"]
    if "state" in numpy:
        numpy_state = decode_plain(numpy["state"])
    else:
        words = {"key": tensors[f"{prefix}numpy"].numpy().astype(np.uint32), "pos": numpy["position"]}
        cached = {"has_gauss": numpy["has_gauss"], "gauss": numpy["cached"]}
        numpy_state = {"bit_generator": numpy["name"], "state": words, **cached}
    kinds = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    return {
        **{kind: tensors[prefix + kind] for kind in kinds if "/" not in kind and kind not in ("python", "numpy")},
        "python": (python["version"], tuple(tensors[f"{prefix}python"].tolist()), python["gauss"]),
        "numpy": numpy_state,
    }


# --- generators ------------------------------------------------------------------------------------------------------


_PART_BYTES = 64
"""Number of bytes of a Mersenne Twister's words that a fingerprint includes.

A draw changes the position; when the position starts over, all words have changed. A few words are therefore as good
as all 624, which are no longer in the processor's caches after the kernels of a step: reading them took 50 us.
"""


class _AbstractGenerator(ABC):
    """A global random number generator. `fingerprint` must be cheap, because every step calls it several times."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return bytes that change with every draw and every new seed."""

    @abstractmethod
    def get(self) -> Any:
        """Return the state of the generator."""

    @abstractmethod
    def set(self, state: Any) -> None:
        """Restore a state that `get` returned."""

    @abstractmethod
    def seeded(self, seed: int) -> Any:
        """Return the state of a new generator with this seed."""


class _TorchGenerator(_AbstractGenerator):
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        # get_state() copies 5 kB, so read the memory of the CPU's generator instead, if its layout is the known one.
        self._parts = _state_parts(generator) if generator.device.type == "cpu" and _has_known_layout() else None

    def fingerprint(self) -> bytes:
        if self._parts is not None:
            return _read_parts(*self._parts)
        return self._generator.get_state().numpy().tobytes()

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        self._generator.set_state(state)

    def seeded(self, seed: int) -> Any:
        return torch.Generator(device=self._generator.device).manual_seed(seed).get_state()


_SCANNED_BYTES = 256
"""How far into a generator to look for its engine. The whole object has 2.6 kB."""
_WORDS_OFFSET = 20
"""Bytes from the seed of the engine to its first word."""
_CACHED_BYTES = 24
"""Bytes of the cached normal numbers behind the last word."""


def _state_parts(generator: torch.Generator) -> tuple[Any, Any] | None:
    """Return views of a CPU generator's memory: seed, position and first words; cached numbers. None if not found.

    The engine of ATen's CPUGeneratorImpl holds the seed, the number of words left, whether it is seeded, the position
    and 624 words. Cached normal numbers follow.
    """
    # get_state() widens each word to 8 bytes and puts the same fields into another order.
    state = generator.get_state().numpy()
    address = getattr(generator, "_cdata", None)
    if address is None or len(state) < 24 + 8 * 624:
        return None
    words = state[24 : 24 + 8 * 8].view(np.uint64).astype(np.uint32).tobytes()
    seen = (ctypes.c_char * _SCANNED_BYTES).from_address(address).raw
    offset = seen.find(words)
    seed = offset - _WORDS_OFFSET
    if seed < 0 or seen[seed : seed + 8] != state[:8].tobytes():
        return None
    first = (ctypes.c_char * _PART_BYTES).from_address(address + seed)
    return first, (ctypes.c_char * _CACHED_BYTES).from_address(address + offset + 4 * 624)


def _read_parts(first: Any, last: Any) -> bytes:
    """Return the fields in both parts without the padding between them, which set_state() fills with any bytes."""
    fields, cached = first.raw, last.raw
    # A float and a double, each followed by a flag that says whether there is one.
    one, two = cached[4:8] if cached[8] else b"", cached[12:20] if cached[20] else b""
    return bytes(fields[:13] + fields[16:] + one + b"|" + two)


@functools.cache
def _has_known_layout() -> bool:
    """Return whether the bytes of `_state_parts` change with each draw, each seed and at no other time."""
    one = torch.Generator().manual_seed(1)
    parts = _state_parts(one)
    if parts is None:
        return False

    def read() -> tuple[bytes, bytes]:
        return _read_parts(*parts), one.get_state().numpy().tobytes()

    # A single normal number is drawn as one of two, and the other is kept: such a draw moves no word.
    draws = (
        lambda: torch.randn((), generator=one),
        lambda: torch.randn((), generator=one, dtype=torch.float64),
        lambda: torch.rand(3, generator=one),
        lambda: torch.randint(9, (2,), generator=one),
        lambda: torch.randn(700, generator=one),
        lambda: one.manual_seed(1),
        lambda: one.set_state(one.get_state()),
    )
    for draw in (*draws, *draws, draws[0], draws[0], draws[1], draws[1]):
        (part, whole), _ = read(), draw()
        after, whole_after = read()
        if (part != after) != (whole != whole_after):
            return False
    return True


class _PythonGenerator(_AbstractGenerator):
    def __init__(self) -> None:
        # random.getstate() takes 10 us, so read the memory of the object instead. CPython stores the index and 624
        # state words after the object header. If they do not match getstate(), the layout is different, so
        # `fingerprint` calls getstate().
        self._part: ctypes.Array[ctypes.c_char] | None = None
        own = random._inst
        if type(own).__sizeof__(own) >= object.__basicsize__ + 4 * 625:
            address = id(own) + object.__basicsize__
            words = (ctypes.c_uint32 * 625).from_address(address)
            if (*words[1:], words[0]) == random.getstate()[1]:
                self._part = (ctypes.c_char * _PART_BYTES).from_address(address)

    def fingerprint(self) -> bytes:
        if self._part is None:
            return repr(random.getstate()).encode()
        return self._part.raw + repr(random._inst.gauss_next).encode()  # type: ignore[attr-defined]

    def get(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        random.setstate(state)

    def seeded(self, seed: int) -> Any:
        return random.Random(seed).getstate()


class _NumpyGenerator(_AbstractGenerator):
    def __init__(self) -> None:
        # np.random.get_state() takes 40 us, so read the memory of the object as long as nothing has been drawn: 624
        # state words and the position. After that, the fingerprint must include the cached normal number, which only
        # get_state() returns.
        self._own = np.random.mtrand._rand._bit_generator
        self._parts: tuple[ctypes.Array[ctypes.c_char], ...] = ()
        self._unused: bytes | None = None
        state = np.random.get_state(legacy=False)
        if isinstance(self._own, np.random.MT19937):
            address = self._own.ctypes.state_address
            words = (ctypes.c_uint32 * 625).from_address(address)
            if not state["has_gauss"] and [*words] == [*state["state"]["key"].tolist(), state["state"]["pos"]]:
                part = ctypes.c_char * _PART_BYTES
                # The last word is the position in the state.
                self._parts = part.from_address(address), part.from_address(address + 4 * 625 - _PART_BYTES)
                self._unused = self._read()

    def _read(self) -> bytes:
        first, last = self._parts
        return first.raw + last.raw

    def fingerprint(self) -> bytes:
        if self._unused is not None and np.random.mtrand._rand._bit_generator is self._own:
            words = self._read()
            if words == self._unused:
                return words
        state = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            return repr(encode_plain(state)).encode()
        rest = (state["state"]["pos"], state["has_gauss"], state["gauss"])
        return bytes(state["state"]["key"].tobytes()) + repr(rest).encode()

    def get(self) -> Any:
        return np.random.get_state(legacy=False)

    def set(self, state: Any) -> None:
        np.random.set_state(state)

    def seeded(self, seed: int) -> Any:
        kind = type(np.random.mtrand._rand._bit_generator)
        return np.random.RandomState(kind(seed % 2**32)).get_state(legacy=False)
