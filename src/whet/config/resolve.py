"""Combine defaults, config file and command line; reject unknown keys with a suggestion."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from whet.base.errors import UsageError
from whet.config.foreign_keys import unknown_key
from whet.config.options import ALIASES, DTYPE_ALIASES, CommonConfig, OptionsModel
from whet.config.sources import flatten, nest, parse_args, read_config_file
from whet.plan.setting import Scalar
from whet.plan.workload import AutoBatch

# The value that a user should give, by the type of pydantic's error.
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
    "callable_type": "a function",
}

C = TypeVar("C", bound=CommonConfig)
Options = TypeVar("Options", bound=OptionsModel)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Generic[C]):
    """The config of a recipe, and the keys that the user has given, which a plan never changes."""

    config: C
    given: tuple[str, ...]
    is_batch_open: bool = False
    """Whether global_batch_size=auto is yet to be measured. Until then, the config has the recipe's default size."""
    batch: AutoBatch | None = None
    """The measured global batch size, or None if it was not measured."""

    @property
    def overrides(self) -> dict[str, Scalar]:
        """The settings of the plan that the user has given."""
        chosen = {key: getattr(self.config, key) for key in self.config.plan_keys() if key in self.given}
        return {key: value for key, value in chosen.items() if value != "auto"}

    def with_batch(self, chosen: AutoBatch) -> "ResolvedConfig[C]":
        """Return a copy with the measured global batch size and the learning rate scaled to it."""
        config = self.config.model_copy(update={"global_batch_size": chosen.batch, "lr": chosen.rates[0]})
        return replace(self, config=config, is_batch_open=False, batch=chosen)


def resolve_config(
    model: type[C],
    args: Iterable[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    file: Path | None = None,
    can_measure: bool = False,
) -> ResolvedConfig[C]:
    """Return the config of a recipe from a file, key=value arguments and Python values.

    Raise UsageError for an unknown key or an invalid value. `can_measure` allows global_batch_size=auto. The caller
    must then measure the size.
    """
    parsed = parse_args(args)
    from_file = _apply_aliases(flatten(dict(read_config(model, file))), model.group_aliases) if file else {}
    from_args = _apply_aliases({**parsed.values, **flatten(dict(values or {}))}, model.group_aliases)
    known = known_keys(model)
    source = "the command line" if values is None else "the call"
    for keys, where in ((from_file, str(file)), (from_args, source), (dict.fromkeys(parsed.dropped), source)):
        _check_keys(keys, known, f"unknown key in {where}", model=model)
    # `~key` drops the value from the file, so that the default applies.
    flat = {**{key: value for key, value in from_file.items() if key not in parsed.dropped}, **from_args}
    # "none" was parsed as null, but for some keys, as in `freeze=none`, it is the name of a choice.
    flat = {key: "none" if value is None and _has_choice_none(known[key]) else value for key, value in flat.items()}
    is_batch_open = flat.get("global_batch_size") == "auto"
    if is_batch_open:
        if not can_measure:
            raise auto_batch_error("this command does not measure")
        # Use the default until the size is measured. The default learning rate belongs to the default size.
        del flat["global_batch_size"]
    return ResolvedConfig(config=_validate(model, nest(flat)), given=tuple(sorted(flat)), is_batch_open=is_batch_open)


def read_config(model: type[C], file: Path) -> Mapping[str, Any]:
    """Return the keys of a config file, or of the built-in config with that name."""
    named = model.named_configs
    if file.name in named and not file.exists():
        return named[file.name]
    if not file.suffix and not file.exists():
        # Names for Hydra's --config-name have no suffix, and Hydra looks them up in config/.
        folders = (file.parent, Path("config"))
        paths = [
            path for folder in folders for end in (".yaml", ".toml") if (path := folder / f"{file.name}{end}").exists()
        ]
        built_in = " or ".join(f"--config-name {name}" for name in named)
        hint = f"--config {paths[0]}" if paths else built_in or "--config FILE.yaml"
        raise UsageError("no such configuration", got=f"--config-name {file}", try_=hint)
    content = read_config_file(file)
    if isinstance(content.get("defaults"), list):
        raise _defaults_list_error(content["defaults"], file, named)
    return content


def _defaults_list_error(defaults: list[Any], file: Path, named: Mapping[str, Any]) -> UsageError:
    """Return the error for Hydra's defaults list, which names files to merge. It lists the keys to move."""
    parts = [item for entry in defaults if isinstance(entry, dict) for item in entry.items()]
    moved = [f"the keys of {group}/{name}.yaml under {group}:" for group, name in parts]
    hint = " and ".join(["delete defaults:" + (" and hydra:" if parts else ""), *(f"write {keys}" for keys in moved)])
    if file.stem in named:
        hint += f"; or --config-name {file.stem}, which is built in"
    listed = ", ".join(f"{group}: {name}" for group, name in parts) or str(defaults)[:200]
    return UsageError(
        "Hydra's defaults list is not supported: a config file contains all its keys",
        got=f"{file}: defaults: {listed}",
        try_=hint,
    )


def read_options(model: type[Options], keywords: Mapping[str, object]) -> Options:
    """Return options from Python keywords. Raise UsageError with a suggestion for an unknown keyword."""
    _check_keys(keywords, known_keys(model), "unknown keyword")
    return _validate(model, dict(keywords))


def auto_batch_error(why: str) -> UsageError:
    """Return the error for a command that cannot measure global_batch_size=auto."""
    return UsageError(
        "global_batch_size=auto has to be measured",
        got=why,
        try_="global_batch_size=N; or auto with whet train, whet plan --measure or whet bench, on the machine itself",
    )


def known_keys(model: type[BaseModel], *, prefix: str = "") -> dict[str, FieldInfo]:
    """Return every dotted key of a config model, with the field that has its type, default and description."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        group = _group_model(field.annotation)
        if group is None:
            keys[f"{prefix}{name}"] = field
        else:
            keys |= known_keys(group, prefix=f"{prefix}{name}.")
    return keys


def _group_model(annotation: Any) -> type[BaseModel] | None:
    # Look inside unions too, because a group may be optional: `arch: TextArch | None`.
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _apply_aliases(values: Mapping[str, Any], group_aliases: Mapping[str, str]) -> dict[str, Any]:
    """Replace keys of other tools, and torch's dtype names for precisions, with whet's names."""
    aliases = {**ALIASES, **group_aliases}
    # If both a key and its alias are given, the value is ambiguous.
    for alias, key in aliases.items():
        if alias in values and key in values:
            raise UsageError("a key is given twice", got=f"{alias} and {key}", try_=f"only {key}")
    renamed = {aliases.get(key, key): value for key, value in values.items()}
    if isinstance(renamed.get("precision"), str):
        renamed["precision"] = DTYPE_ALIASES.get(renamed["precision"], renamed["precision"])
    return renamed


def _check_keys(
    values: Mapping[str, Any], known: Mapping[str, FieldInfo], error: str, *, model: type[BaseModel] | None = None
) -> None:
    groups = {key.rpartition(".")[0] for key in known}
    for key in values:
        if key in groups and key not in known:
            raise UsageError(f"{key!r} is a group of keys", got=key, try_=f"{key}.NAME=VALUE")
        if key not in known:
            raise unknown_key(key, values, known, error=error, model=model)


def _has_choice_none(field: FieldInfo) -> bool:
    """Return whether "none" is a valid value of a key, and null is not."""
    members = _union_members(field.annotation)
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    return "none" in choices and type(None) not in members


def _union_members(annotation: Any) -> list[Any]:
    """Return the types in a union, including those in nested unions and Annotated types."""
    if get_origin(annotation) is Literal or not get_args(annotation):
        return [annotation]
    return [member for part in get_args(annotation) for member in _union_members(part)]


def _validate(model: type[Options], values: dict[str, Any]) -> Options:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explain_validation(error, known_keys(model)) from None


def _explain_validation(error: ValidationError, known: Mapping[str, FieldInfo]) -> UsageError:
    """Return the error for the first invalid value, with the expected values and an example."""
    details = error.errors()
    key = _key_of_error(details[0], known)
    if details[0]["type"] == "missing":
        return UsageError(f"{key} is missing", got=f"no {key}", try_=f"{key}=... ({known[key].description})")
    # A union reports one error per member. List each expected value once, in order.
    expected = dict.fromkeys(_expected_text(detail) for detail in details if _key_of_error(detail, known) == key)
    field = known.get(key)
    hint = None
    if field is not None:
        example = key if field.is_required() or field.default is None else f"{key}={field.default}"
        hint = f"{example} ({field.description})"
    return UsageError(f"{key} must be {' or '.join(expected)}", got=repr(details[0]["input"])[:200], try_=hint)


def _key_of_error(detail: ErrorDetails, known: Mapping[str, FieldInfo]) -> str:
    """Return the longest known key in the location of an error, which also contains the branch of a union."""
    parts = [str(part) for part in detail["loc"]]
    keys = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((key for key in keys if key in known), keys[-1] if keys else "the config")


def _expected_text(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return _EXPECTED.get(detail["type"]) or message
