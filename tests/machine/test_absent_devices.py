"""Why MPS or CUDA cannot be used: one row for each cause."""

import pytest

from whet.machine import probe
from whet.machine.facts import OperatingSystem
from whet.machine.nvidia import NvidiaCard, NvidiaCards
from whet.machine.probe import DeviceFacts, hides_all_gpus, missing_devices
from whet.machine.torch_info import TorchInfo

MAC = OperatingSystem(name="macOS", version="15.1", architecture="arm64")
INTEL_MAC = OperatingSystem(name="macOS", version="13.7", architecture="x86_64")
OLD_MAC = OperatingSystem(name="macOS", version="13.7", architecture="arm64")
MACOS_14 = OperatingSystem(name="macOS", version="14.6", architecture="arm64")
LINUX = OperatingSystem(name="Linux", architecture="x86_64")
WORKING = NvidiaCards("working", (NvidiaCard(name="NVIDIA H200", driver="550.54.14"),))
MISSING = TorchInfo(error="torch is not installed")
BROKEN = TorchInfo(error="torch 2.13.0 cannot be imported: ImportError: no libgomp")
CPU_BUILD = TorchInfo(version="2.13.0", mps_built=False, mps_available=False, cuda_available=False)
MPS_BUILD = TorchInfo(version="2.13.0", mps_built=True, mps_available=False, cuda_available=False)
NEW_BUILD = TorchInfo(version="2.15.0", mps_built=True, mps_available=False, cuda_available=False)
CUDA_BUILD = TorchInfo(version="2.13.0", cuda_build="13.0", cuda_available=False, mps_available=False)
TOO_OLD = CUDA_BUILD.model_copy(update={"cuda_error": "RuntimeError: The NVIDIA driver on your system is too old"})
ODD = CUDA_BUILD.model_copy(update={"cuda_error": "RuntimeError: CUDA unknown error"})


def on(os, torch, **facts):
    return DeviceFacts(os=os, torch=torch, **facts)


MPS_ROWS = [
    (on(LINUX, CPU_BUILD), "does not run macOS", "--machine"),
    (on(INTEL_MAC, MISSING, has_apple_silicon=False), "Intel processor", "CPU"),
    (on(INTEL_MAC, CPU_BUILD, has_apple_silicon=True), "Rosetta", "arm64"),
    (on(OLD_MAC, MPS_BUILD, has_apple_silicon=True), "macOS 13.7 is too old; MPS of torch 2.13.0 needs", "macOS 14"),
    (on(MACOS_14, NEW_BUILD, has_apple_silicon=True), "MPS of torch 2.15.0 needs macOS 15", "install 'torch<2.15'"),
    (on(MAC, MISSING, has_apple_silicon=True), "torch is not installed", "pip install"),
    (on(MAC, BROKEN, has_apple_silicon=True), "no libgomp", "import torch"),
    (on(MAC, CPU_BUILD, has_apple_silicon=True), "torch 2.13.0 was built without MPS", "pip install"),
    (on(MAC, MPS_BUILD, has_apple_silicon=True), "no Metal device", "virtual machine"),
]
CUDA_ROWS = [
    (on(MAC, MPS_BUILD), "no CUDA on macOS", "MPS"),
    (on(LINUX, CUDA_BUILD, has_card_on_bus=True), "driver is not installed", "install NVIDIA's driver"),
    (on(LINUX, CPU_BUILD, has_card_on_bus=False), "no NVIDIA GPU", "CPU"),
    (on(LINUX, CUDA_BUILD), "there is no NVIDIA driver", "--gpus all"),
    (on(LINUX, CUDA_BUILD, cards=NvidiaCards("not running")), "does not run", "nvidia-smi"),
    (on(LINUX, CUDA_BUILD, cards=NvidiaCards("no card")), "finds no GPU", "passed through"),
    (on(LINUX, MISSING, cards=WORKING), "NVIDIA H200 is here, but torch is not installed", "pip install"),
    (on(LINUX, BROKEN, cards=WORKING), "NVIDIA H200 is here, but torch 2.13.0 cannot be imported", "import torch"),
    (on(LINUX, CPU_BUILD, cards=WORKING), "torch 2.13.0 was built without CUDA", "pytorch.org"),
    (on(LINUX, CUDA_BUILD, cards=WORKING, visible_devices=""), "CUDA_VISIBLE_DEVICES", "unset"),
    (on(LINUX, TOO_OLD, cards=WORKING), "driver 550.54.14 is too old for torch 2.13.0 (built for CUDA 13.0)", "update"),
    (on(LINUX, ODD, cards=WORKING), "cannot start CUDA: RuntimeError: CUDA unknown error", "restart"),
]


def explained(situation, device):
    return next(result for result in missing_devices(situation) if result.device == device)


@pytest.mark.parametrize(("situation", "reason", "cure"), MPS_ROWS)
def test_why_no_mps(situation, reason, cure):
    result = explained(situation, "mps")
    assert reason in result.reason
    assert cure in result.fix


@pytest.mark.parametrize(("situation", "reason", "cure"), CUDA_ROWS)
def test_why_no_cuda(situation, reason, cure):
    result = explained(situation, "cuda")
    assert reason in result.reason
    assert cure in result.fix


@pytest.mark.parametrize(
    ("device", "rows", "reasons"), [("mps", MPS_ROWS, probe._NO_MPS_CAUSES), ("cuda", CUDA_ROWS, probe._NO_CUDA_CAUSES)]
)
def test_every_cause_is_tested(device, rows, reasons):
    used = {next(i for i, why in enumerate(reasons) if why.applies(situation)) for situation, _, _ in rows}
    assert used == set(range(len(reasons)))


def test_available_devices_are_not_reported_missing():
    both = TorchInfo(version="2.13.0", cuda_build="13.0", cuda_available=True, mps_available=True)
    assert missing_devices(on(LINUX, both, cards=WORKING)) == ()
    mac = MPS_BUILD.model_copy(update={"mps_available": True})
    assert [result.device for result in missing_devices(on(MAC, mac))] == ["cuda"]


def test_output_with_braces_is_not_formatted():
    odd = TorchInfo(error="torch {version} {0} {nonsense}")
    assert "{nonsense}" in explained(on(MAC, odd), "mps").reason


@pytest.mark.parametrize("value", ["", " ", "-1", "-1,0", "NoDevFiles"])
def test_values_that_hide_every_gpu(value):
    assert hides_all_gpus(value) is True


@pytest.mark.parametrize("value", [None, "0", "1,0", "GPU-1234"])
def test_values_that_hide_no_gpu(value):
    assert hides_all_gpus(value) is False


def test_an_unknown_version_of_macos_is_not_called_old():
    unknown = OperatingSystem(name="macOS", version=None, architecture="arm64")
    assert "too old" not in explained(on(unknown, MPS_BUILD, has_apple_silicon=True), "mps").reason
