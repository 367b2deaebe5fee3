"""How are arrays kept in a file so that a damaged one is never taken for them?"""

import hashlib
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.run import durable

Arrays = dict[str, NDArray[Any]]
_DIGEST = "sha256"


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Whole or not at all."""
    buffer = io.BytesIO()
    kept: Any = {**arrays, _DIGEST: np.array(_digest(arrays))}
    np.savez_compressed(buffer, **kept)
    durable.write_file(path, data=buffer.getvalue())


def read_arrays(path: Path) -> Arrays | None:
    """What was written; None where it is missing, or not what was written."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files}
        digest = str(arrays.pop(_DIGEST))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return arrays if digest == _digest(arrays) else None


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
