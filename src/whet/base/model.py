"""Frozen pydantic models: values that can be printed, compared, written as JSON and read back."""

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from whet.base.errors import UsageError, closest_match


class FrozenModel(BaseModel):
    """An immutable value whose fields are validated; unknown fields are rejected."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def as_json(self) -> dict[str, Any]:
        """Return the value as dicts, lists, strings, numbers and None, which JSON can represent."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: object, *, where: str | Path) -> Self:
        """Return the value from plain JSON types. `where` names the source in errors."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise to_usage_error(error, where=str(where), fields=cls.model_fields) from None


def to_usage_error(error: ValidationError, *, where: str, fields: Any) -> UsageError:
    """Convert the first validation error to a UsageError. `fields` are the known names, for suggestions."""
    # Report only the first error, because the rest often follow from it.
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "(the whole)"
    if first["type"] == "extra_forbidden":
        meant = closest_match(str(first["loc"][-1]), fields)
        hint = f"did you mean {meant!r}?" if meant else "known keys: " + ", ".join(sorted(fields))
        return UsageError(f"unknown key in {where}", got=key, try_=hint)
    if first["type"] == "missing":
        return UsageError(f"a key is missing in {where}", got=f"no {key!r}", try_=f"add {key!r}")
    return UsageError(f"{key!r} in {where} has a wrong value", got=repr(first["input"])[:200], try_=first["msg"])
