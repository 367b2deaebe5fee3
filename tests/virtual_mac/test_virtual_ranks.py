"""Several processes on a simulated Mac: refused before any of them starts."""

from pathlib import Path

import pytest

from virtual_process import INSTALL, environment
from warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.usefixtures("_built")
def test_several_processes_are_refused_on_a_simulated_mac(tmp_path: Path, home: Path, warm_python: WarmPython) -> None:
    """Both commands run in one process, because a virtual Mac takes seconds to set up."""
    program = (
        INSTALL
        + "import os\nfrom whet.cli.main import run\n"
        + "two = ['train', 'text', '--nproc', '2']\n"
        + "codes = [run(two), run([*two, '--device', 'mps'])]\n"
        + f"os.environ.update({TORCHRUN!r}, MASTER_PORT='29500')\n"
        + "codes.append(run(['train', 'text', '--device', 'mps']))\nprint(codes, os.listdir())"
    )
    ended = warm_python.run("-c", program, cwd=tmp_path, env=environment(home))
    assert ended.stdout.strip() == "[2, 2, 2] []", ended.stderr
    assert ended.stderr.count("several processes cannot train together on MPS") == 3
    assert ended.stderr.count("--device cpu, where they communicate through gloo") == 3
