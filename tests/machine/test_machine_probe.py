"""The whole probe: facts of the system, the driver and torch, without anything private."""

import json
import platform
import socket
import time
from pathlib import Path

import pytest

from fake_torch_child import FOLDER_VARIABLE
from machine_samples import answering, silent
from whet.base.units import GB
from whet.machine import probe as module
from whet.machine.facts import Machine, OperatingSystem, ProbeResult, SystemState
from whet.machine.nvidia import NvidiaCard, NvidiaCards
from whet.machine.pressure import SystemStateReader
from whet.machine.probe import SystemReadings, assemble_machine, probe, probe_machine, read_system
from whet.machine.torch_info import CudaInfo, TorchInfo

MPS_TORCH = TorchInfo(
    version="2.13.0",
    num_threads=4,
    mps_built=True,
    mps_available=True,
    mps_recommended_bytes=5726633984,
    mps_num_cores=10,
    cuda_available=False,
)
CUDA_TORCH = TorchInfo(
    version="2.13.0",
    cuda_build="13.0",
    cuda_available=True,
    cuda_devices=(
        CudaInfo(name="NVIDIA H200", memory_bytes=141 * 10**9, capability="9.0", num_multiprocessors=132),
        CudaInfo(name="NVIDIA H200", memory_bytes=141 * 10**9, capability="9.0", num_multiprocessors=132),
    ),
    mps_built=False,
    mps_available=False,
)


@pytest.fixture(autouse=True)
def no_hidden_cards(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def mac(name):
    return read_system(run=answering(name), system="darwin", architecture="arm64")


def test_a_mac_with_torch_has_one_accelerator():
    machine = assemble_machine(mac("m2-air"), torch=MPS_TORCH)
    gpu = machine.accelerator("mps")
    assert (gpu.num_cores, gpu.usable_bytes, gpu.memory_bytes, gpu.capability) == (10, 5726633984, 8 * GB, "apple8")
    assert [result.device for result in machine.absent] == ["cuda"]
    assert (machine.name, machine.origin, machine.chip) == ("this machine", "probed", "Apple M2")
    assert machine.torch.num_threads == 4


def test_a_mac_with_a_broken_torch_keeps_its_facts_and_the_reason():
    machine = assemble_machine(mac("m2-air"), torch=TorchInfo(error="torch 2.13.0 cannot be imported: ImportError: x"))
    assert machine.accelerators == ()
    assert machine.cpu.fast_cores == 4
    assert machine.absent[0].reason == machine.torch.error


def test_a_mac_where_no_program_answers():
    machine = assemble_machine(read_system(run=silent, system="darwin", architecture="arm64"), torch=MPS_TORCH)
    gpu = machine.accelerator("mps")
    assert (gpu.num_cores, gpu.usable_bytes, gpu.memory_bytes, gpu.name) == (10, 5726633984, None, None)


def test_cards_come_from_torch_and_their_driver_from_nvidia_smi(monkeypatch):
    card = NvidiaCard("NVIDIA H200", 1, "580.65.06", "9.0")
    system = SystemReadings(
        Machine(name="this machine", chip="AMD EPYC", os=OperatingSystem(name="Linux")),
        cards=NvidiaCards("working", (card, card)),
    )
    machine = assemble_machine(system, torch=CUDA_TORCH)
    assert len(machine.accelerators) == 2
    gpu = machine.accelerator("cuda")
    assert (gpu.num_cores, gpu.usable_bytes, gpu.capability, gpu.driver) == (132, 141 * 10**9, "9.0", "580.65.06")
    assert (gpu.shares_memory, machine.chip) == (False, "NVIDIA H200")
    assert [result.device for result in machine.absent] == ["mps"]
    hidden = CUDA_TORCH.model_copy(update={"cuda_available": False, "cuda_devices": ()})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = assemble_machine(system, torch=hidden)
    assert machine.accelerators == ()
    assert "CUDA_VISIBLE_DEVICES" in machine.absent[1].reason


@pytest.mark.parametrize("name", ["m2-air", "m5-pro", "intel"])
def test_a_probe_can_be_written_and_read(name):
    now = SystemStateReader(system="darwin", run=answering(name), libc=object())()
    result = ProbeResult(machine=assemble_machine(mac(name), torch=MPS_TORCH), system_state=now)
    assert ProbeResult.from_json(json.loads(json.dumps(result.as_json())), where="here") == result


def test_torch_is_queried_in_parallel_with_the_system(monkeypatch):
    started = []

    class Asking:
        def __enter__(self):
            started.append("torch")
            return lambda: started.append("answer") or MPS_TORCH

        def __exit__(self, *_):
            started.append("end")

    monkeypatch.setattr(module, "torch_query", Asking)
    monkeypatch.setattr(module, "read_system", lambda: started.append("system") or mac("m2-air"))
    monkeypatch.setattr(module, "read_system_state", lambda: started.append("system_state") or SystemState())
    assert probe().machine.chip == "Apple M2"
    assert started == ["torch", "system", "system_state", "answer", "end"]


@pytest.fixture
def broken_torch(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('on purpose')")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("whet.machine.torch_info._TARGET", "fake_torch_child:describe_fake_torch")


def test_this_machine_is_probed_with_a_torch_that_raises(broken_torch, tmp_path, capfd):
    start = time.monotonic()
    result = probe()
    assert time.monotonic() - start < 15
    assert "on purpose" in result.machine.torch.error or result.machine.torch.error == "torch is not installed"
    assert result.machine.python == platform.python_version()
    assert result.machine.accelerators == ()
    assert result.system_state.memory_available_bytes > 0
    assert capfd.readouterr() == ("", "")


def test_nothing_private_is_in_a_probe(broken_torch, tmp_path):
    text = json.dumps(probe().as_json())
    assert str(tmp_path) not in text
    assert str(Path.home()) == "/" or str(Path.home()) not in text
    assert '"name": "this machine"' in text
    host = socket.gethostname()
    assert len(host) < 5 or host not in text


def test_probe_machine_equals_the_machine_of_probe(broken_torch):
    here = probe_machine()
    assert here.name == "this machine"
    assert here.origin == "probed"
