"""benchmarks/ports.py: equal and different loops are recognized, and scripts are edited by the beginnings of lines."""

import os
import sys
from pathlib import Path

import pytest

from warm_python import WarmPython

pytestmark = pytest.mark.torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from ports.port import Edit  # noqa: E402
from ports.record import PortRecord  # noqa: E402

# A project with a loop, its port, and a port with another learning rate.
TOY = '''
import sys
from ports import child, registry
from ports.port import Edit, Port

loop = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
call = """
import whet
with whet.Session(model, optimizer, loader, epochs=3, run="run") as session:
    for batch in session:
        session.step(nn.functional.mse_loss, batch)
        torch.randn(3)  # a loop that samples from its model now and then
"""
edit = Edit(first="for epoch", last="optimizer.step", new=call)
wrong = Edit(first="optimizer =", new="optimizer = torch.optim.SGD(model.parameters(), lr=0.11)")
for name, edits in (("toy", (edit,)), ("wrong", (edit, wrong))):
    port = Port(name=name, repository="a/toy", files=(), script="loop.py", driver=loop, edits=edits)
    registry.PORTS[name] = port
if sys.argv[1] == "copy":
    port = registry.PORTS[sys.argv[2]]
    from pathlib import Path
    print(port.copy_code(Path(), Path(sys.argv[3], "code"), is_ported=sys.argv[4] == "ported"))
else:
    child.main()
'''


def losses(warm_python: WarmPython, folder: Path, name: str, kind: str, *options: str) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    target = folder / f"{name}-{kind}"
    (target / "code").mkdir(parents=True)
    for arguments in (("copy", name, str(target), kind), (name, kind, str(target), f"{target}.record", *options)):
        done = warm_python.run("-c", TOY, *arguments, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
    return PortRecord.load(Path(f"{target}.record")).losses


def test_a_port_is_equal_to_its_original_and_a_wrong_one_is_not(warm_python: WarmPython, tmp_path: Path) -> None:
    ported = losses(warm_python, tmp_path, "toy", "ported")
    replay = ("--replay", str(tmp_path / "toy-ported.record"))
    assert len(ported) == 15
    assert losses(warm_python, tmp_path, "toy", "original", *replay) == ported
    wrong = losses(warm_python, tmp_path, "wrong", "ported")
    assert wrong[0] == ported[0]
    assert max(abs(a - b) for a, b in zip(wrong, ported, strict=True)) > 1e-4


def test_an_edit_replaces_lines_and_counts_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import a\ndef f():\n    for x in y:\n        g(x)\n\n        h(x)\n    for x in z:\n        k()\n"
    )
    edit = Edit(first="for x in", last="h(x)", new="\nwith s:\n    t()\n")
    assert edit.apply(script) == (3, 2)
    assert script.read_text() == "import a\ndef f():\n    with s:\n        t()\n    for x in z:\n        k()\n"
    with pytest.raises(IndexError):
        Edit(first="while").apply(script)
