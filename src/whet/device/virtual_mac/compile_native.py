"""Child program that compiles the C++ sources into an extension.

A separate process, because torch's builder loads setuptools, prints, and changes the environment.
"""

import sys
from pathlib import Path


def compile_extension(name: str, sources: Path, folder: Path) -> None:
    """Build NAME.so in `folder`."""
    import torch  # noqa: F401 - the extension needs its libraries
    from torch.utils.cpp_extension import load

    # All sources in one translation unit: torch's headers, which take most of the time, are parsed once.
    unit = folder / "unit.cpp"
    unit.write_text("".join(f'#include "{path.name}"\n' for path in sorted(sources.glob("*.cpp"))))
    load(
        name,
        [str(unit)],
        # Little optimization builds in half the time; the work is done in torch's own kernels.
        extra_cflags=["-O1", "-w"],
        extra_include_paths=[str(sources)],
        build_directory=str(folder),
        with_cuda=False,
    )


if __name__ == "__main__":
    compile_extension(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
