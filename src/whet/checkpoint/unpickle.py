"""Child program that reads a torch file: the only place where a pickle is loaded."""

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

ANSWER_PREFIX = "whet-import-answer "

KNOWN_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "ema", "ema_state_dict")
"""Where programs put a model's weights in a file that holds more; looked for in this order."""

WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before every name."""

_MAX_DEPTH = 16
_MAX_ENTRIES = 1_000_000
_MAX_LEFT_OUT = 1_000
_MAX_NAME_LENGTH = 500
_EXTRA_ADDRESS_SPACE = 2 * 1024**3
"""Address space beside the file's own tensors and one copy of them."""

_FOREIGN_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|instantiate unsupported class ([\w.]+)|(?:class|function) ([\w.]+)")


def main(arguments: list[str]) -> int:
    """Reads, writes and answers; the exit code says nothing, the answer does."""
    target, key, seconds = Path(arguments[0]), arguments[1] or None, int(arguments[2])
    # Whatever torch prints must not mix with the answer.
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
    """What a file of this size may need of this process, and no more. macOS does not enforce all of it."""
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
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (wanted, wanted))


def unpack(file: Any, target: Path, *, key: str | None) -> dict[str, Any]:
    """Writes the tensors of a model to `target`; what was taken from where, and what was left out."""
    content = _load(file)
    chosen, where = select_weights(content, key)
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, str] = {}
    total = 0
    for name, value in flatten(chosen):
        if is_plain_tensor(value):
            if name in tensors:
                raise WhetError("two tensors have one name", got=name[:200], try_="--key NAME, for one of their places")
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
        raise WhetError("the file holds no tensors", got=place, try_="--key NAME")
    size = os.fstat(0).st_size
    # Storages lie in the file once; names that share one are rare and few.
    if len(tensors) > MAX_TENSORS or total > 2 * size:
        got = f"{len(tensors):,} tensors of {total:,} bytes in a file of {size:,}"
        raise WhetError("the file says it holds more than it can", got=got, try_="the file's origin")
    names, wrapper = strip_wrappers(tensors)
    durable.write_draft(target, data=encode_tensors(names))
    return {"key": where, "wrapper": wrapper, "left_out": left_out}


def _load(file: Any) -> Any:
    try:
        # Literally, since an environment variable can change the default; and no second way, since the file would
        # choose it.
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        found = _FOREIGN_GLOBAL.search(text)
        if found:
            name = next(filter(None, found.groups()))
            hint = "a file that torch.save(model.state_dict(), ...) wrote, or safetensors"
            raise WhetError("the file asks for code, not only for tensors", got=name[:200], try_=hint) from None
        what = f"{type(error).__name__}: {text}"[:300]
        raise WhetError("torch cannot read the file", got=what, try_="the file's origin") from None


def select_weights(content: Any, key: str | None) -> tuple[Any, str]:
    """The part of the file that holds the weights, and its dotted name; the whole where tensors lie at the top."""
    if not isinstance(content, Mapping):
        raise WhetError("the file holds no names", got=type(content).__name__, try_="a file with a state_dict")
    if key is not None:
        place: Any = content
        for part in key.split("."):
            if not isinstance(place, Mapping) or part not in place:
                there = [str(name) for name in place][:20] if isinstance(place, Mapping) else []
                meant = closest_match(part, there)
                hint = f"--key {meant}" if meant else f"one of {', '.join(there)}"[:300]
                raise WhetError("the file has no such key", got=key, try_=hint)
            place = place[part]
        return place, key
    if any(isinstance(value, Tensor) for value in content.values()):
        return content, ""
    for name in KNOWN_KEYS:
        if isinstance(content.get(name), Mapping):
            return content[name], name
    held = ", ".join(str(name) for name in list(content)[:20])
    raise WhetError("no known key holds the weights", got=held[:300] or "nothing", try_="--key NAME")


def flatten(content: Any) -> Iterator[tuple[str, Any]]:
    """Everything in nested maps by dotted name; a file may hold itself, or one map a thousand times."""
    count = 0
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        count += 1
        if count > _MAX_ENTRIES or depth > _MAX_DEPTH or len(name) > _MAX_NAME_LENGTH:
            got = f"over {_MAX_ENTRIES:,} entries, {_MAX_DEPTH} levels or a name of {_MAX_NAME_LENGTH} letters"
            raise WhetError("the file's names make no sense", got=got, try_="the file's origin")
        if isinstance(value, Mapping):
            inside = [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in value.items()]
            waiting.extend(reversed(inside))
        else:
            yield name, value


def is_plain_tensor(value: Any) -> bool:
    """Whether it is numbers in memory and nothing else."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized and not value.is_meta


def strip_wrappers(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The names without what a wrapper put before each of them."""
    wrapper = ""
    while found := next((w for w in WRAPPERS if all(name.startswith(w) for name in tensors)), None):
        tensors = {name.removeprefix(found): tensor for name, tensor in tensors.items()}
        wrapper += found
    return tensors, wrapper


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
