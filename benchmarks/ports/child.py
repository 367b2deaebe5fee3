"""Run one loop in a process of its own: python -m ports.child PORT original|ported FOLDER RECORD [--stop STEP:SIGNAL]

FOLDER has a copy of the project in `code`; the current folder becomes FOLDER, with stand-ins for data.
"""

import argparse
import os
import random
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

from ports.hooks import PortRecorder, Replayer
from ports.record import PortRecord
from ports.registry import PORTS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", choices=PORTS)
    parser.add_argument("kind", choices=("original", "ported"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--stop", help="step and number of a signal")
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--replay", type=Path, help="the record that the original loop repeats")
    arguments = parser.parse_args()
    port = PORTS[arguments.port]
    record = arguments.record.resolve()
    replay = None if arguments.replay is None else arguments.replay.resolve()
    os.chdir(arguments.folder)
    script = Path("code", port.script).resolve()
    sys.path[:0] = [str(script.parent), *(str(Path("code", path).resolve()) for path in port.paths)]
    sys.argv = [str(script), *port.arguments]
    torch.set_num_threads(1)
    # For scripts that do not seed.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    port.prepare()
    if arguments.kind == "ported":
        stop = None if arguments.stop is None else tuple(int(part) for part in arguments.stop.split(":"))
        PortRecorder(record, stop=stop, save_at=arguments.save_at).install()  # type: ignore[arg-type]
        runpy.run_path(str(script), run_name="__main__")
        return
    assert replay is not None
    recorded = PortRecord.load(replay)
    if port.replay is not None:
        port.replay(recorded)
    replayer = Replayer(recorded, num_backwards=port.num_backwards)
    replayer.install()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        print(end)
    replayer.save(record)


if __name__ == "__main__":
    main()
