"""The search space: config overrides with a range or a list instead of a single value."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.config.options import CommonConfig
from whet.config.resolve import known_keys, resolve_config
from whet.config.sources import as_argument, as_text, parse_args, parse_value

_NUMBER = r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})((?::[^:]*)*)")
# Keys that must be the same in all trials, and what to do instead of searching them.
_NOT_SEARCHED = {
    "seed": "--seeds K: the best are trained with several seeds before a winner is named",
    "seeds": "--seeds K: the best are trained with several seeds before a winner is named",
    "split_seed": "one split for all trials: settings are compared on the same rows",
    "data": "one search for each data set",
    "data_paths": "one search for each data set",
    "init_from": "one search for each initialization",
    "label_column": "one search for each task",
    "label_separator": "one search for each task",
    "group_column": "one split for all trials: settings are compared on the same rows",
    "goal": "goal=NAME: what is compared must be the same",
    "eval_every": "eval_every=N: trials are compared at the same evaluations",
    "epochs_per_session": "leave it out: a trial is trained in one session",
}
# Keys that a search cannot even set to a single value.
_NOT_SET = ("seeds", "epochs_per_session")
_EXAMPLES = "lr=1e-5..1e-3:log, arch.layers=[1,2,4] or global_batch_size=32..512:step=32"

# Ranges with more points than this cannot be searched as a grid.
MAX_VALUES = 100_000
Choice = bool | int | float | str | None


class NumberRange(FrozenModel):
    """Numbers from low to high, both included."""

    kind: Literal["range"] = "range"
    low: float
    high: float
    is_log: bool = False
    step: float | None = None
    is_integer: bool = False
    """Whether only integers are allowed."""

    @property
    def ends(self) -> tuple[Any, Any]:
        return (int(self.low), int(self.high)) if self.is_integer else (self.low, self.high)

    @property
    def values(self) -> tuple[Any, ...] | None:
        """All values, or None for a continuous or logarithmic range and for more than MAX_VALUES values."""
        if self.is_log or (self.step is None and not self.is_integer):
            return None
        step = self.step or 1
        # Add an epsilon, so that rounding does not drop the upper end: (0.3 - 0.1) / 0.1 is 1.9999999999999998.
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > MAX_VALUES:
            return None
        values = [self.low + number * step for number in range(count)]
        return tuple(int(value) for value in values) if self.is_integer else tuple(values)

    def __str__(self) -> str:
        low, high = map(_short, self.ends)
        step = "" if self.step is None else f":step={_short(self.step)}"
        return f"{low}..{high}{':log' if self.is_log else ''}{step}"


class Choices(FrozenModel):
    """A list of values to choose from."""

    kind: Literal["choices"] = "choices"
    values: tuple[Choice, ...]

    def __str__(self) -> str:
        return f"[{','.join(as_text(value) for value in self.values)}]"


def _short(number: float) -> str:
    """Return the shortest text that represents a number exactly."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


Dimension = Annotated[NumberRange | Choices, Field(discriminator="kind")]


class SearchSpace(FrozenModel):
    """The ranges and choices to search, by dotted key."""

    dimensions: dict[str, Dimension]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The space as command-line arguments."""
        return tuple(f"{key}={dimension}" for key, dimension in self.dimensions.items())


def read_space(
    config: type[CommonConfig], arguments: Iterable[str], *, file: Mapping[str, Any] | None = None
) -> tuple[SearchSpace, tuple[str, ...]]:
    """Return the search space that arguments and a file describe, and the arguments that set a single value.

    Every choice and both ends of every range are validated with the config, so that errors appear before training.
    """
    known = known_keys(config)
    dimensions: dict[str, NumberRange | Choices] = {}
    fixed: list[str] = []
    for argument in (*_file_arguments(file or {}), *arguments):
        key, equals, text = argument.lstrip("+").partition("=")
        dimension = _dimension(text.strip(), argument, holds_list=_holds_list(known.get(key))) if equals else None
        if dimension is None:
            fixed.append(argument)
        else:
            dimensions[key] = dimension
    if not dimensions:
        raise UsageError("nothing to search", got=" ".join(fixed) or "no arguments", try_=_EXAMPLES)
    for key in parse_args(fixed).values:
        if key in _NOT_SET:
            raise UsageError(f"{key} cannot be set in a search", got=key, try_=_NOT_SEARCHED[key])
        if key in dimensions:
            raise UsageError("a key is both set and searched", got=key, try_="one of them")
    for key in dimensions:
        _check_searchable(key, config)
    return SearchSpace(dimensions=_checked(config, dimensions, fixed)), tuple(fixed)


def _file_arguments(file: Mapping[str, Any]) -> list[str]:
    """Return the entries of a file as key=value arguments: ranges as strings, lists of choices, and single values."""
    # as_argument() quotes strings, so that "7" does not become a number. A string that contains a list stays as it is.
    return [
        f"{key}={value}" if isinstance(value, str) and value.startswith("[") else as_argument(key, value)
        for key, value in file.items()
    ]


def _dimension(text: str, argument: str, *, holds_list: bool) -> NumberRange | Choices | None:
    """Return the range or choices that an argument describes, or None if it sets a single value."""
    if match := _RANGE.fullmatch(text):
        return _range(match[1], match[2], match[3], argument)
    if not text.startswith("["):
        return None
    values = parse_value(text, argument)
    # A key that takes a list is set to [a,b]. Its choices are [[a,b],[c,d]].
    if holds_list and not all(isinstance(value, list) for value in values):
        return None
    if any(isinstance(value, list) for value in values):
        raise UsageError("a choice is a number, a text or a boolean", got=argument, try_="key=[a,b]")
    unique = tuple(dict.fromkeys((type(value).__name__, value) for value in values))
    if len(unique) < 2:
        raise UsageError("a list of choices needs at least two values", got=argument, try_=_EXAMPLES)
    return Choices(values=tuple(value for _, value in unique))


def _range(low: str, high: str, options: str, argument: str) -> NumberRange:
    is_log, step = False, None
    for option in filter(None, options.split(":")):
        name, _, value = option.partition("=")
        if option == "log":
            is_log = True
        elif name == "step" and re.fullmatch(_NUMBER, value) and float(value) > 0:
            step = float(value)
        else:
            raise UsageError("a range may have :log or :step=N", got=argument, try_=_EXAMPLES)
    ends = float(low), float(high)
    if not ends[0] < ends[1] or not all(map(math.isfinite, ends)):
        raise UsageError("a range goes from the lower number to the higher", got=argument, try_=_EXAMPLES)
    if is_log and ends[0] <= 0:
        raise UsageError("a logarithmic range starts above 0", got=argument, try_=_EXAMPLES)
    if is_log and step is not None:
        raise UsageError("a range has :log or :step=N, not both", got=argument, try_=_EXAMPLES)
    if step is not None:
        count = math.floor((ends[1] - ends[0]) / step + 1e-9)
        if count < 1:
            raise UsageError("the step is larger than the range", got=argument, try_=_EXAMPLES)
        # Lower the upper end to the last value that can be drawn: 4..8:step=3 ends at 7.
        ends = ends[0], min(ends[1], ends[0] + count * step)
    numbers = [low, high, *([] if step is None else [repr(step) if step % 1 else str(int(step))])]
    return NumberRange(
        low=ends[0],
        high=ends[1],
        is_log=is_log,
        step=step,
        is_integer=all(isinstance(parse_value(n, n), int) for n in numbers),
    )


def _holds_list(field: Any) -> bool:
    annotation = None if field is None else field.annotation
    return any(get_origin(part) in (tuple, list) for part in (annotation, *get_args(annotation)))


def _check_searchable(key: str, config: type[CommonConfig]) -> None:
    if key in config.plan_keys():
        raise UsageError(
            f"{key} belongs to the plan: it is measured, not searched",
            got=key,
            try_=f"whet plan --measure, or {key}=...",
        )
    if key in _NOT_SEARCHED:
        raise UsageError(
            f"{key} cannot be searched: it must be the same in all trials", got=key, try_=_NOT_SEARCHED[key]
        )


def _checked(
    config: type[CommonConfig], dimensions: Mapping[str, NumberRange | Choices], fixed: Sequence[str]
) -> dict[str, NumberRange | Choices]:
    """Validate choices and range ends with the config, and determine which ranges contain only integers."""
    checked = dict(dimensions)
    # A value may be valid only with some values of other keys (the number of heads must divide the width), so one valid
    # combination is enough.
    others = {key: list(_samples(dimension)) for key, dimension in dimensions.items()}
    for key, dimension in dimensions.items():
        beside = {k: v for k, v in others.items() if k != key}
        resolved_values = [_resolved_value(config, key, value, beside, fixed) for value in _samples(dimension)]
        if isinstance(dimension, NumberRange):
            checked[key] = dimension.model_copy(update={"is_integer": _is_integer(key, dimension, resolved_values)})
        elif len(set(map(repr, resolved_values))) < len(resolved_values):
            raise UsageError("two choices are the same", got=f"{key}={dimension}", try_="each of them once")
    return checked


def _is_integer(key: str, given: NumberRange, resolved_values: Sequence[Any]) -> bool:
    """Return whether a range contains only integers. 1e2..1e3 does if the config converts both ends to integers."""
    if any(isinstance(value, float) for value in resolved_values):
        return False
    if all(isinstance(value, int) for value in resolved_values) and given.step is not None and given.step % 1:
        raise UsageError(f"{key} takes integers only", got=f"{key}={given}", try_=f"{key}=...:step=1")
    return given.is_integer or all(isinstance(value, int) for value in resolved_values)


def _samples(dimension: NumberRange | Choices) -> tuple[Any, ...]:
    return dimension.ends if isinstance(dimension, NumberRange) else dimension.values


def _resolved_value(
    config: type[CommonConfig], key: str, value: Any, others: Mapping[str, Sequence[Any]], fixed: Sequence[str]
) -> Any:
    """Return the value of a key after validation, in a combination with the other keys that makes the config valid."""
    first_error: UsageError | None = None
    for count, combination in enumerate(product(*others.values())):
        others_given = [as_argument(name, other) for name, other in zip(others, combination, strict=True)]
        try:
            resolved = resolve_config(config, [*fixed, *others_given, as_argument(key, value)])
        except UsageError as error:
            first_error = first_error or error
            # Give up after 64 combinations, because the product of all choices may be huge.
            if count >= 63:
                break
            continue
        result: Any = resolved.config
        for part in key.split("."):
            result = getattr(result, part)
        return result
    assert first_error is not None
    raise first_error
