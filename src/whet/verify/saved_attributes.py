"""Find attributes that a user's state_dict leaves out: change one in a copy of the object and read the state."""

import copy
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whet.verify.hidden_state import StateWalk, item_names
from whet.verify.library_objects import attributes_of, has_hidden_state

_MARK = "\0whet"
_MAX_TESTS = 200
"""Maximum number of attributes and items of one object to test. The others count as saved."""
_COPIED = (dict, list, deque, defaultdict, OrderedDict)


class _NotCopiedError(Exception):
    """Raised if an object cannot be copied without calling the user's code, or has a `__del__` method."""


class SavedAttributes:
    """The attributes on which the state of one object depends.

    An attribute belongs to the state if a copy of the object with a different value of the attribute returns a
    different state. The object itself is not changed. Only the object and the containers that lead to the attribute are
    copied, one level deep.
    """

    def __init__(self, obj: Any, read: Callable[[Any], Any], *, prefix: str, known: Mapping[int, Any]) -> None:
        self._obj = obj
        self._read = read
        """Returns the state of the object, or of a copy."""
        self._prefix = prefix
        """The name of the object."""
        self._known = known
        self._is_saved: dict[str, bool] = {}
        """Results by the name of the attribute or item."""

    def unsaved(self, names: Sequence[str]) -> list[str]:
        """Return the names among `names` that are not part of the object's state, or do not belong to the object."""
        states: list[dict[str, bytes]] = []
        return [name for name in names if not self._contains(name, states)]

    def _contains(self, name: str, states: list[dict[str, bytes]]) -> bool:
        value, prefix = self._obj, self._prefix
        path: tuple[Any, ...] = ()
        while True:
            parts = ((n, s) for n, s in _parts(value, prefix) if n == name or name.startswith((f"{n}.", f"{n}[")))
            prefix, step = next(parts, ("", None))
            if step is None:
                # With a path, this is inside a saved part that is not divided further, such as an item of a tuple.
                # Without a path, the name does not belong to this object.
                return bool(path)
            path = (*path, step)
            if prefix not in self._is_saved and len(self._is_saved) < _MAX_TESTS:
                self._is_saved[prefix] = self._depends_on(path, states)
            if not self._is_saved.get(prefix, True):
                return False
            if prefix == name:
                return True
            value = _get(value, step)

    def _depends_on(self, path: tuple[Any, ...], states: list[dict[str, bytes]]) -> bool:
        try:
            if not states:
                # Read the state twice, to ignore parts that always differ, such as the time.
                states += [self._digests(self._obj), self._digests(self._obj)]
            first, second = states
            value = self._obj
            for step in path:
                value = _get(value, step)
            now = self._digests(_with(self._obj, path, _other_value(value)))
            if any(first[n] != now.get(n) for n in first if first[n] == second.get(n)) or now.keys() - first.keys():
                return True
        except Exception:
            # If the user's code fails with the copy, it has read the attribute. If the object cannot be copied, the
            # answer is unknown. Count the attribute as saved in both cases.
            return True
        return False

    def _digests(self, obj: Any) -> dict[str, bytes]:
        walk = StateWalk(known=self._known, follows_code=False)
        walk.walk(self._read(obj), "state")
        return walk.finish()


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each attribute or item, and its kind and key for `_get`."""
    if type(value) in _COPIED:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        yield from ((item, ("item", key)) for item, key in item_names(value, keys, name))
    elif not isinstance(value, type | types.ModuleType):
        yield from ((f"{name}.{key}".removeprefix("."), ("attribute", key)) for key, _ in attributes_of(value))


def _get(value: Any, step: tuple[str, Any]) -> Any:
    how, key = step
    return value[key] if how == "item" else dict(attributes_of(value))[key]


def _with(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """Return a copy of `value` in which the part at `path` is `other`."""
    if not path:
        return other
    (how, key), rest = path[0], path[1:]
    part = _with(_get(value, path[0]), rest, other)
    if how == "item":
        copied = copy.copy(value)
        copied[key] = part
        return copied
    kind: Any = type(value)
    if has_hidden_state(kind) or hasattr(kind, "__del__"):
        raise _NotCopiedError
    copied = object.__new__(kind)
    for name, item in attributes_of(value):
        _set(copied, name, item)
    _set(copied, key, part)
    return copied


def _set(target: Any, name: str, value: Any) -> None:
    if hasattr(target, "__dict__") and not isinstance(getattr(type(target), name, None), types.MemberDescriptorType):
        vars(target)[name] = value
    else:
        object.__setattr__(target, name, value)


def _other_value(value: Any) -> Any:
    """Return a different value of the same type and length, or a string, which most code does not accept."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if value == value and value + 1 != value else 0
    if type(value) in (list, deque) and value:
        return type(value)([_MARK] * len(value))
    if type(value) is dict and value:
        return dict.fromkeys(value, _MARK)
    return _MARK
