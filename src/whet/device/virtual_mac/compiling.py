"""Run as a program in a child process: compiles the sources in one folder into an extension in another.

A process of its own, because torch's builder loads setuptools, prints, and changes the environment.
"""

import sys
from pathlib import Path


def compile_extension(name: str, sources: Path, folder: Path) -> None:
    """Leaves NAME.so in `folder`."""
    import torch  # noqa: F401 - the extension needs its libraries
    from torch.utils.cpp_extension import load

    load(
        name,
        [str(path) for path in sorted(sources.glob("*.cpp"))],
        # Little optimization: built in half the time, and the work is done in torch's own kernels.
        extra_cflags=["-O1", "-w"],
        build_directory=str(folder),
        with_cuda=False,
    )


if __name__ == "__main__":
    compile_extension(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
