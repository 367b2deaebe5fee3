"""Child program that loads a torch file. No other code in whet unpickles files."""

import contextlib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import WhetError, closest_match
from whet.checkpoint.encoding import MAX_TENSORS, encode_tensors
from whet.run import durable

# Marks the result line, because torch may print other lines.
ANSWER_PREFIX = "whet-import-answer "

KNOWN_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "ema", "ema_state_dict")
"""Common keys of the weights in a file that contains more than weights, in order of preference."""

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile add to every name."""

_MAX_DEPTH = 16
_MAX_ENTRIES = 1_000_000
_MAX_LEFT_OUT = 1_000
_MAX_NAME_LENGTH = 500
_EXTRA_ADDRESS_SPACE = 2 * 1024**3
"""Address space for torch itself, in addition to the tensors in the file and copies of them."""

# Matches the class or function that torch refuses to unpickle, in the messages of several torch versions.
_FOREIGN_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|instantiate unsupported class ([\w.]+)|(?:class|function) ([\w.]+)")


def main(arguments: list[str]) -> int:
    """Load the file on stdin, write its tensors, and print the result as one line of JSON.

    The exit code is always 0, because the result line contains the error.
    """
    target, key, seconds = Path(arguments[0]), arguments[1] or None, int(arguments[2])
    # Redirect stdout to stderr, so that torch's output does not mix with the result line.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(0, "rb", closefd=False) as file:
            size = os.fstat(0).st_size
            limit_process(size, seconds=seconds)
            answer = unpack(file, target, key=key)
    except WhetError as error:
        answer = {"error": [error.what, error.got, error.try_]}
    except MemoryError:
        answer = {"error": ["the file needs more memory than its size allows", f"{size:,} bytes", None]}
    with os.fdopen(answer_to, "wb") as pipe:
        pipe.write(f"{ANSWER_PREFIX}{json.dumps(answer)}\n".encode())
    return 0


def limit_process(size: int, *, seconds: int) -> None:
    """Limit the resources of this process to what a file of this size needs. macOS does not enforce all limits."""
    used = 0
    with contextlib.suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: size + 64 * 1024**2,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_AS: used + 3 * size + _EXTRA_ADDRESS_SPACE,
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # The limits are an additional protection, so the import continues on a system that rejects one.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (wanted, wanted))


def unpack(file: Any, target: Path, *, key: str | None) -> dict[str, Any]:
    """Write the tensors of a model to `target`. Return their key in the file and the skipped entries."""
    content = _load(file)
    chosen, where = select_weights(content, key)
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, str] = {}
    total = 0
    for name, value in flatten(chosen):
        if is_plain_tensor(value):
            if name in tensors:
                raise WhetError(
                    "two tensors have the same name", got=name[:200], try_="--key NAME to select one of them"
                )
            total += value.numel() * value.element_size()
            tensors[name] = value
        elif len(left_out) < _MAX_LEFT_OUT:
            left_out[name] = type(value).__name__
    if isinstance(content, Mapping) and chosen is not content:
        beside = (str(name)[:_MAX_NAME_LENGTH] for name in content if str(name) != where.partition(".")[0])
        for name in list(beside)[:_MAX_LEFT_OUT]:
            left_out[name] = "not under the chosen key"
    if not tensors:
        place = f"under {where!r}" if where else "at its top"
        raise WhetError("the file contains no tensors", got=place, try_="--key NAME")
    size = os.fstat(0).st_size
    # The file contains each storage once. Tied tensors share storages, but a factor above two is suspicious: views of
    # one small storage could expand to any size on disk.
    if len(tensors) > MAX_TENSORS or total > 2 * size:
        got = f"{len(tensors):,} tensors of {total:,} bytes in a file of {size:,}"
        raise WhetError("the file declares more data than it contains", got=got, try_="download or save the file again")
    names, wrapper = strip_wrappers(tensors)
    durable.write_draft(target, data=encode_tensors(names))
    return {"key": where, "wrapper": wrapper, "left_out": left_out}


def _load(file: Any) -> Any:
    try:
        # weights_only is explicit, because an environment variable can change its default. There is no fallback to
        # another loader, because a malicious file could trigger it.
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        match = _FOREIGN_GLOBAL.search(text)
        if match:
            name = next(filter(None, match.groups()))
            hint = "a file that torch.save(model.state_dict(), ...) wrote, or safetensors"
            raise WhetError("the file contains code, not only tensors", got=name[:200], try_=hint) from None
        what = f"{type(error).__name__}: {text}"[:300]
        raise WhetError("torch cannot read the file", got=what, try_="download or save the file again") from None


def select_weights(content: Any, key: str | None) -> tuple[Any, str]:
    """Return the part of the file that contains the weights, and its dotted key.

    The key is empty if the tensors are at the top level. Raise WhetError if no weights are found.
    """
    if not isinstance(content, Mapping):
        raise WhetError("the file is not a dict", got=type(content).__name__, try_="a file with a state_dict")
    if key is not None:
        value: Any = content
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                keys = [str(name) for name in value][:20] if isinstance(value, Mapping) else []
                meant = closest_match(part, keys)
                hint = f"--key {meant}" if meant else f"one of {', '.join(keys)}"[:300]
                raise WhetError("the file has no such key", got=key, try_=hint)
            value = value[part]
        return value, key
    if any(isinstance(value, Tensor) for value in content.values()):
        return content, ""
    for name in KNOWN_KEYS:
        if isinstance(content.get(name), Mapping):
            return content[name], name
    held = ", ".join(str(name) for name in list(content)[:20])
    raise WhetError("cannot find the weights in the file", got=held[:300] or "nothing", try_="--key NAME")


def flatten(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values of nested dicts with their dotted names.

    Raise WhetError if a limit is exceeded, as by a dict that contains itself.
    """
    count = 0
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        count += 1
        if count > _MAX_ENTRIES or depth > _MAX_DEPTH or len(name) > _MAX_NAME_LENGTH:
            got = f"over {_MAX_ENTRIES:,} entries, {_MAX_DEPTH} levels or a name of {_MAX_NAME_LENGTH} characters"
            raise WhetError(
                "the file is nested too deeply or has too many entries", got=got, try_="download or save the file again"
            )
        if isinstance(value, Mapping):
            inside = [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in value.items()]
            # Push the items in reverse, because the stack returns the last item first.
            waiting.extend(reversed(inside))
        else:
            yield name, value


def is_plain_tensor(value: Any) -> bool:
    """Return whether the value is a dense tensor with data."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized and not value.is_meta


def strip_wrappers(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Remove the prefixes of wrappers from all names. Return the tensors and the prefix that was removed."""
    wrapper = ""
    while prefix := next((w for w in WRAPPERS if all(name.startswith(w) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        wrapper += prefix
    return tensors, wrapper


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
