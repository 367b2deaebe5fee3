"""The query of torch in a child: whatever torch does there, the result is a record and the screen stays clean."""

import importlib.metadata
import json
import sys
import time

import pytest

from fake_torch_child import FOLDER_VARIABLE, MESSAGE_VARIABLE
from whet.machine import torch_info
from whet.machine.facts import TorchFacts
from whet.machine.torch_info import TIMEOUT_SECONDS, TorchInfo, torch_query

HEAD = "__version__ = '2.13.0'\n"
MODULES = """
import sys, types
def make(name, **values):
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    return module
"""
GPU = """
class Device:
    name, total_memory, major, minor, multi_processor_count = "NVIDIA H200", 141 * 10**9, 9, 0, 132
version = make("torch.version", cuda="13.0")
cuda = make("torch.cuda", is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda i: Device)
backends = make("torch.backends", mps=make("torch.backends.mps", is_built=lambda: False, is_available=lambda: False))
get_num_threads = lambda: 16
"""
MAC = """
version = make("torch.version", cuda=None)
cuda = make("torch.cuda", is_available=lambda: False)
mps = make("torch.mps", recommended_max_memory=lambda: 5726633984)
found = make("torch.backends.mps", is_built=lambda: True, is_available=lambda: True, get_core_count=lambda: 10)
backends = make("torch.backends", mps=found)
get_num_threads = lambda: 4
"""


def query_torch(*, timeout_seconds: float = TIMEOUT_SECONDS) -> TorchInfo:
    """Query torch and wait for the result."""
    with torch_query(timeout_seconds=timeout_seconds) as result:
        return result()


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """Put a torch with the given source before the real one in the child."""

    def install(source):
        (tmp_path / "torch.py").write_text(source)
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setattr(torch_info, "_TARGET", "fake_torch_child:describe_fake_torch")
        monkeypatch.setattr(torch_info, "is_installed", lambda: True)
        monkeypatch.setattr(torch_info, "installed_version", lambda: "2.13.0")

    return install


def test_cuda_devices_are_listed(fake_torch):
    fake_torch(HEAD + MODULES + GPU)
    answer = query_torch()
    assert answer.error is None
    assert answer.facts() == TorchFacts(version="2.13.0", cuda_build="13.0", mps_built=False, num_threads=16)
    assert answer.cuda_available is True
    device = answer.cuda_devices[1]
    assert (device.name, device.memory_bytes, device.capability) == ("NVIDIA H200", 141 * 10**9, "9.0")
    assert device.num_multiprocessors == 132


def test_the_working_set_of_mps_is_reported(fake_torch):
    fake_torch(HEAD + MODULES + MAC)
    answer = query_torch()
    assert (answer.mps_available, answer.mps_recommended_bytes, answer.mps_num_cores) == (True, 5726633984, 10)
    assert answer.cuda_available is False
    assert answer.cuda_error is None


def test_a_question_that_fails_leaves_the_others(fake_torch):
    fails = """
def fail(): raise RuntimeError("invalid low watermark ratio 1.4")
mps.recommended_max_memory = fail
"""
    fake_torch(HEAD + MODULES + MAC + fails)
    answer = query_torch()
    assert (answer.mps_available, answer.mps_recommended_bytes, answer.mps_num_cores) == (True, None, 10)


def test_why_cuda_does_not_start_is_kept(fake_torch):
    too_old = """
def init(): raise RuntimeError("The NVIDIA driver on your system\\nis too old")
cuda.is_available, cuda.init = lambda: False, init
"""
    fake_torch(HEAD + MODULES + GPU + too_old)
    answer = query_torch()
    assert answer.cuda_error == "RuntimeError: The NVIDIA driver on your system is too old"
    assert answer.version == "2.13.0"


def test_a_card_that_cannot_be_described_is_not_available(fake_torch):
    fake_torch(HEAD + MODULES + GPU + "del Device.total_memory\n")
    answer = query_torch()
    assert answer.cuda_available is False
    assert "total_memory" in answer.cuda_error


def test_another_torch_version_may_lack_attributes(fake_torch):
    fake_torch(HEAD)
    answer = query_torch()
    assert answer.facts().version == "2.13.0"
    assert (answer.mps_built, answer.cuda_available) == (None, False)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('libcudart.so.13:\\n cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def", "SyntaxError"),
        ("import os; os._exit(7)", "torch 2.13.0 could not be queried: exit code 7"),
        ("import os; os._exit(0)", "torch 2.13.0 could not be queried: exit code 0"),
        ("import os; os.kill(os.getpid(), 11)", "torch 2.13.0 could not be queried: killed by SIGSEGV"),
        ("raise Exception('x' * 100000)", "Exception: xxx"),
    ],
)
def test_a_broken_torch_gives_a_one_line_error(fake_torch, source, says):
    fake_torch(source)
    facts = query_torch().facts()
    assert says in facts.error
    assert "\n" not in facts.error
    assert len(facts.error) <= 300
    assert facts == TorchFacts(error=facts.error)


def test_a_torch_that_hangs_is_given_up(fake_torch):
    fake_torch("import time; time.sleep(60)")
    start = time.monotonic()
    answer = query_torch(timeout_seconds=0.5)
    assert answer.error == "torch 2.13.0 did not answer in time"
    assert time.monotonic() - start < 20


def test_output_of_torch_is_neither_parsed_nor_shown(fake_torch, capfd):
    junk = (
        "import os, sys, warnings\n"
        'print(\'{"version": "9.9"}\')\n'
        "os.write(1, b'\\xff junk from C\\n' * 100000)\n"
        "sys.stderr.write('noise' * 50000)\n"
        "warnings.warn('CUDA initialization: noise')\n"
    )
    fake_torch(junk + HEAD + MODULES + MAC)
    assert query_torch().version == "2.13.0"
    assert capfd.readouterr() == ("", "")


def test_a_torch_that_prints_without_end_times_out(fake_torch):
    fake_torch("while True: print('x' * 1000)")
    assert query_torch(timeout_seconds=2).error == "torch 2.13.0 did not answer in time"


def test_a_file_named_torch_in_the_working_folder_is_not_torch(tmp_path, monkeypatch, fake_torch):
    fake_torch(HEAD + MODULES + MAC)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "torch.py").write_text("raise RuntimeError('I am a notes file')")
    monkeypatch.chdir(folder)
    assert query_torch().error is None


def test_an_orphaned_process_does_not_block_the_query(fake_torch):
    fake_torch(HEAD + MODULES + MAC + "import os, time\nif os.fork() == 0: time.sleep(300)\n")
    start = time.monotonic()
    assert query_torch().version == "2.13.0"
    assert time.monotonic() - start < 60


def test_the_child_works_while_we_do_other_things(fake_torch, tmp_path):
    fake_torch("import pathlib; pathlib.Path(__file__).with_name('seen').touch()\n" + HEAD + MODULES + MAC)
    with torch_query() as answer:
        deadline = time.monotonic() + 600
        while not (tmp_path / "seen").exists():
            assert time.monotonic() < deadline, "torch is queried only when the result is needed"
            time.sleep(0.01)
        assert answer().version == "2.13.0"


def test_the_child_ends_with_us(fake_torch):
    fake_torch("import time; time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), torch_query():
        raise ZeroDivisionError
    assert time.monotonic() - start < 20


def test_without_torch_no_child_is_started(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_info, "JsonWorker", lambda *_, **__: pytest.fail("a child was started"))
    assert query_torch().facts() == TorchFacts(error="torch is not installed")


def test_a_torch_without_an_installers_note_is_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert torch_info.is_installed()


def test_a_python_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(torch_info, "is_installed", lambda: True)
    monkeypatch.setattr(sys, "executable", "/whet/no/such/python")
    assert "could not be started" in query_torch().error


@pytest.mark.parametrize("message", [{"version": 2.13}, {"unknown": 1}, {"cuda_devices": {"name": "x"}}])
def test_a_message_of_the_wrong_shape_is_an_error(fake_torch, monkeypatch, message):
    fake_torch(HEAD)
    monkeypatch.setattr(torch_info, "_TARGET", "fake_torch_child:send_message")
    monkeypatch.setenv(MESSAGE_VARIABLE, json.dumps(message))
    assert query_torch().error == "torch 2.13.0 could not be queried: its message is invalid"


def test_torch_is_not_imported_here():
    code = "import sys, whet.machine.probe; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
