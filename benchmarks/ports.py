"""Training loops of other projects: the original against its port to whet, and the port after a stop and a kill.

    python benchmarks/ports.py --code DIR [NAME ...] [--keep DIR]

DIR has a folder for each repository (`git clone`, or an archive of it). For each port, six processes run: the port; the
original with the same samples and the same state of torch's generator before each step; the port stopped by SIGINT and
run again; the port killed by SIGKILL and run again. The table has the largest difference of the losses, relative for
losses above 1, how many lines of the original the port removes and adds, and whether the final weights, buffers and
optimizer state after a stop are bit for bit those of the run without one.
"""

import argparse
import tempfile
from pathlib import Path

from ports.compare import HEADER, compare
from ports.registry import PORTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"ports; all by default: {', '.join(PORTS)}")
    parser.add_argument("--code", type=Path, required=True, help="folder with the repositories")
    parser.add_argument("--keep", type=Path, help="keep copies, runs and logs in this folder")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in PORTS:
            parser.error(f"no port {name}; there are {', '.join(PORTS)}")
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        for name in arguments.names or PORTS:
            print(compare(PORTS[name], arguments.code.resolve(), folder / name).row(), flush=True)


if __name__ == "__main__":
    main()
