"""A program that compiles the C++ sources into a Python extension.

It runs in a child process, because torch's cpp_extension loads setuptools, prints, and changes the environment.
"""

import sys
from pathlib import Path


def compile_extension(name: str, sources: Path, folder: Path) -> None:
    """Build the extension `name`.so in `folder` from the .cpp files in the folder `sources`."""
    import torch  # noqa: F401 - the extension needs its libraries
    from torch.utils.cpp_extension import load

    # Compile all sources as one translation unit, so that torch's headers, which take most of the time, are parsed
    # once.
    unit = folder / "unit.cpp"
    unit.write_text("".join(f'#include "{path.name}"\n' for path in sorted(sources.glob("*.cpp"))))
    load(
        name,
        [str(unit)],
        # -O1 halves the build time. It does not slow down the work, which is done by torch's kernels.
        extra_cflags=["-O1", "-w"],
        extra_include_paths=[str(sources)],
        build_directory=str(folder),
        with_cuda=False,
    )


if __name__ == "__main__":
    compile_extension(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
