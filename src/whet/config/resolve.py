"""Combine defaults, config file and command line; reject unknown keys with a suggestion."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from whet.base.errors import UsageError, closest_match
from whet.config.options import ALIASES, DTYPE_ALIASES, CommonConfig
from whet.config.sources import flatten, nest, parse_args, read_config_file
from whet.plan.setting import Scalar
from whet.plan.workload import AutoBatch

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list such as [a,b]",
}

C = TypeVar("C", bound=CommonConfig)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Generic[C]):
    """A recipe's config, and which keys the user gave (a plan never overrides those)."""

    config: C
    given: tuple[str, ...]
    is_batch_open: bool = False
    """global_batch_size=auto: the config has the recipe's own number, which lr is meant for, until it is measured."""
    batch: AutoBatch | None = None
    """What was measured."""

    @property
    def overrides(self) -> dict[str, Scalar]:
        """The given keys that are settings of the plan."""
        top = {key: getattr(self.config, key) for key in self.config.plan_keys if key in self.given}
        return {key: value for key, value in top.items() if value != "auto"}

    def with_batch(self, chosen: AutoBatch) -> "ResolvedConfig[C]":
        """With the global batch that was measured, and the learning rate that goes with it."""
        numbers = {"global_batch_size": chosen.batch, "lr": chosen.rates[0]}
        config = self.config.model_copy(update=numbers)
        return replace(self, config=config, is_batch_open=False, batch=chosen)


def resolve_config(
    model: type[C], words: Iterable[str] = (), *, file: Path | None = None, can_measure: bool = False
) -> ResolvedConfig[C]:
    """The config of a recipe from a file and words; every key is checked before anything runs.

    `can_measure` is for those who will find a global batch that is left open.
    """
    said = parse_args(words)
    from_file = _apply_aliases(flatten(read_config_file(file)), model.group_aliases) if file else {}
    from_words = _apply_aliases(said.values, model.group_aliases)
    known = known_keys(model)
    for values, where in ((from_file, str(file)), (from_words, "the command line"), (said.dropped, "the command line")):
        _check_keys(values, known, where)
    flat = {**{key: value for key, value in from_file.items() if key not in said.dropped}, **from_words}
    is_batch_open = flat.get("global_batch_size") == "auto"
    if is_batch_open:
        if not can_measure:
            raise auto_batch_error("nothing is measured here")
        del flat["global_batch_size"]
    try:
        config = model.model_validate(nest(flat))
    except ValidationError as error:
        raise _explain_validation(error, known) from None
    return ResolvedConfig(config=config, given=tuple(sorted(flat)), is_batch_open=is_batch_open)


def auto_batch_error(why: str) -> UsageError:
    """The error where a global batch that is left open cannot be found."""
    return UsageError(
        "global_batch_size=auto has to be measured",
        got=why,
        try_="global_batch_size=N; or auto with whet train, whet plan --measure or whet bench, on the machine itself",
    )


def known_keys(model: type[BaseModel], *, prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of a config model with its type, default and description."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        group = _group_model(field.annotation)
        if group is None:
            keys[f"{prefix}{name}"] = field
        else:
            keys |= known_keys(group, prefix=f"{prefix}{name}.")
    return keys


def _group_model(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _apply_aliases(values: Mapping[str, Any], group_aliases: Mapping[str, str]) -> dict[str, Any]:
    """The guides' names for our keys, and torch's names for our precisions."""
    synonyms = {**ALIASES, **group_aliases}
    for other, key in synonyms.items():
        if other in values and key in values:
            raise UsageError("two words for one key", got=f"{other} and {key}", try_=f"only {key}")
    renamed = {synonyms.get(key, key): value for key, value in values.items()}
    if isinstance(renamed.get("precision"), str):
        renamed["precision"] = DTYPE_ALIASES.get(renamed["precision"], renamed["precision"])
    return renamed


def _check_keys(keys: Iterable[str], known: Mapping[str, FieldInfo], where: str) -> None:
    groups = {key.rpartition(".")[0] for key in known}
    for key in keys:
        if key in known:
            continue
        if key in groups:
            raise UsageError(f"{key!r} is a group of keys", got=key, try_=f"{key}.NAME=VALUE")
        inside = next((name for name in known if name.endswith(f".{key}")), None)
        meant = inside or closest_match(key, known)
        hint = f"did you mean {meant!r}?" if meant else "known keys: " + ", ".join(known)
        raise UsageError(f"unknown key in {where}", got=key, try_=hint)


def _explain_validation(error: ValidationError, known: Mapping[str, FieldInfo]) -> UsageError:
    """What the first wrong value should have been."""
    complaints = error.errors()
    key = _key_of_error(complaints[0], known)
    laws = dict.fromkeys(
        _expected_text(complaint) for complaint in complaints if _key_of_error(complaint, known) == key
    )
    field = known.get(key)
    hint = None
    if field is not None:
        example = f"{key}={field.default}" if field.default is not None else key
        hint = f"{example} ({field.description})"
    return UsageError(f"{key} must be {' or '.join(laws)}", got=repr(complaints[0]["input"])[:200], try_=hint)


def _key_of_error(complaint: ErrorDetails, known: Mapping[str, FieldInfo]) -> str:
    """The longest known key that a complaint is about; its place also names the branch of a union."""
    parts = [str(part) for part in complaint["loc"]]
    places = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((place for place in places if place in known), places[-1] if places else "the config")


def _expected_text(complaint: ErrorDetails) -> str:
    return _EXPECTED.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ").removeprefix(
        "Input should be "
    )
