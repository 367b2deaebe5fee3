"""Known machines and the table of chips: every number has a source, and machine files are read or rejected clearly."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.base.errors import UsageError
from whet.base.units import GB
from whet.machine.chips import CHIPS, FAMILY_SOURCE, find_chip
from whet.machine.facts import Machine, ProbeResult, SystemState
from whet.machine.known import example_machine_names, known_machine_names, load_machine, nearest_line, parse_machine

NAMES = ("h200", "linux-2core", "m1-air-8gb", "m2-air-8gb", "m3-max-64gb", "m5-pro-24gb")
MACS = {"m1-air-8gb": 8, "m2-air-8gb": 8, "m3-max-64gb": 64, "m5-pro-24gb": 24}


COMPOSED = [name for name in known_machine_names() if name not in NAMES]


def test_six_machines_have_files_and_others_are_composed():
    assert example_machine_names() == NAMES
    assert len(COMPOSED) == 27
    assert {"m1-mini-8gb", "m1-pro-16gb", "m3-max-96gb", "m4-16gb", "m4-pro-24gb", "m4-max-128gb"} < set(COMPOSED)
    assert {"m5-16gb", "m5-pro-64gb", "m5-max-36gb"} < set(COMPOSED)


@pytest.mark.parametrize("name", [*COMPOSED, "m1-pro,memory=16", "m2-ultra,memory=192", "a18-pro,memory=8"])
def test_a_composed_mac_agrees_with_its_chip(name):
    machine = load_machine(name)
    chip, gpu = find_chip(machine.chip), machine.accelerator("mps")
    assert (machine.name, machine.origin) == (name, "composed")
    assert machine.memory_bytes == gpu.memory_bytes <= chip.max_memory_gb * GB
    assert (machine.cpu.fast_cores, machine.cpu.slow_cores) in chip.cpu
    assert gpu.num_cores in chip.gpu_cores
    assert gpu.capability == chip.gpu_family
    assert 0.65 < gpu.usable_bytes / machine.memory_bytes < 0.85
    assert any("assumed" in source for source in machine.sources)
    assert parse_machine(json.dumps(machine.as_json()), where=name) == machine


def test_a_machine_is_changed_by_options():
    m1 = load_machine("m1-pro,memory=16,torch=2.13.0,macos=14.6")
    assert (m1.torch.version, m1.os.version, m1.memory_bytes) == ("2.13.0", "14.6", 16 * GB)
    assert m1.name == "m1-pro,memory=16,torch=2.13.0,macos=14.6"
    air = load_machine("m2-air-8gb,memory=24gb,torch=2.15")
    assert (air.torch.version, air.memory_bytes) == ("2.15", 24 * GB)
    assert air.accelerator("mps").usable_bytes == 16 * GB
    assert load_machine("h200,torch=2.15.0").torch.version == "2.15.0"


@pytest.mark.parametrize("name", ["m1-air-8gb,torch=2.15", "m4-pro,memory=24,torch=2.15.0,macos=14.6"])
def test_a_mac_that_is_too_old_for_its_torch_has_no_mps(name):
    mac = load_machine(name)
    assert mac.accelerator("mps") is None
    reason = next(missing for missing in mac.absent if missing.device == "mps")
    assert "macOS 14.6 is too old" in reason.reason
    assert "torch<2.15" in reason.fix
    assert load_machine("m1-air-8gb,torch=2.14").accelerator("mps") is not None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("m1-pro", "different sizes of memory"),
        ("m1-pro,memory=64", "up to 32 GB"),
        ("m1-pro,memory=0", "up to 32 GB"),
        ("m1-pro,memory=lots", "up to 32 GB"),
        ("m1-pro,memory=16,color=red", "unknown option"),
        ("h200,memory=16", "only a Mac"),
        ("m9-pro,memory=16", "no machine of that name"),
    ],
)
def test_a_wrong_machine_is_rejected(name, problem):
    with pytest.raises(UsageError, match=problem):
        load_machine(name)


@pytest.mark.parametrize(
    ("real", "nearest"),
    [
        ({"chip": "Apple M1 Pro", "gb": 16, "gpu": 14}, "m1-pro-16gb: 14 GPU cores instead of 16"),
        ({"chip": "Apple M3 Max", "gb": 96, "gpu": 30}, "m3-max-96gb: the same chip, cores and memory"),
        ({"chip": "Apple M4 Pro", "gb": 36, "gpu": 16}, "m4-pro-48gb: 36 GB memory instead of 48 GB, 16 GPU cores"),
        ({"chip": "Apple M7", "gb": 16, "gpu": 10}, "m4-16gb: Apple M7 instead of Apple M4"),
    ],
)
def test_a_probed_mac_names_the_nearest_known_one(real, nearest):
    # Simulated: facts as a probe of such a Mac would return them.
    known = load_machine(nearest.partition(":")[0])
    gpu = known.accelerator("mps").model_copy(update={"num_cores": real["gpu"]})
    changed = {"chip": real["chip"], "memory_bytes": real["gb"] * GB, "accelerators": (gpu,), "origin": "probed"}
    [line] = nearest_line(known.model_copy(update=changed))
    assert f"--machine {nearest}" in line


def test_other_machines_have_no_nearest_mac():
    assert nearest_line(load_machine("h200")) == []
    assert nearest_line(load_machine("linux-2core")) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_known_machine_lists_its_sources(name):
    machine = load_machine(name)
    assert machine.name == name
    assert machine.origin in ("composed", "captured")
    assert machine.sources
    assert machine.torch.version.startswith("2.11.0" if name == "h200" else "2.13.0")
    devices = [a.kind for a in machine.accelerators] + [a.device for a in machine.absent]
    assert sorted(devices) == ["cuda", "mps"]
    if machine.origin == "composed":
        assert any("assumed" in source for source in machine.sources)


@pytest.mark.parametrize(("name", "gigabytes"), MACS.items())
def test_a_known_mac_agrees_with_its_chip(name, gigabytes):
    machine = load_machine(name)
    chip, gpu = find_chip(machine.chip), machine.accelerator("mps")
    assert machine.memory_bytes == gpu.memory_bytes == gigabytes * GB
    assert gigabytes <= chip.max_memory_gb
    assert (machine.cpu.fast_cores, machine.cpu.slow_cores) in chip.cpu
    assert machine.cpu.physical_cores == machine.cpu.fast_cores + machine.cpu.slow_cores
    assert gpu.num_cores in chip.gpu_cores
    assert gpu.capability == chip.gpu_family
    assert gpu.shares_memory
    assert 0.65 < gpu.usable_bytes / machine.memory_bytes < 0.85
    assert machine.is_fanless is ("air" in name)
    assert machine.torch.num_threads == machine.cpu.fast_cores
    reported = " ".join(machine.sources)
    assert all(word in reported for word in ("usable memory", "cores", "bf16", "fan", "GPU family", "threads"))
    assert "#" in next(source for source in machine.sources if source.startswith("usable memory"))


def test_the_air_has_the_working_set_of_8_gb():
    assert load_machine("m2-air-8gb").accelerator("mps").usable_bytes == pytest.approx(8 * GB * 2 / 3, abs=16384)


def test_no_known_machine_contains_a_user_name_or_a_path():
    for name in NAMES:
        text = json.dumps(load_machine(name).as_json())
        assert not any(word in text for word in ("/home/", "/Users/", "/work", "/root"))


def write(tmp_path, data):
    file = tmp_path / "mine.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def test_a_machine_and_a_complete_probe_are_read(tmp_path):
    machine = Machine(name="this machine", chip="Apple M4")
    assert load_machine(write(tmp_path, machine.as_json())) == machine
    whole = ProbeResult(machine=machine, system_state=SystemState(swap_used_bytes=1))
    assert load_machine(str(write(tmp_path, whole.as_json()))) == machine


def test_every_known_machine_survives_being_written_and_read(tmp_path):
    for name in NAMES:
        machine = load_machine(name)
        assert load_machine(write(tmp_path, machine.as_json())) == machine


def test_an_unknown_name_gets_a_suggestion_and_the_list():
    with pytest.raises(UsageError) as caught:
        load_machine("m2-air-8bg")
    assert "did you mean 'm2-air-8gb'" in caught.value.try_
    assert all(name in caught.value.try_ for name in NAMES)
    with pytest.raises(UsageError) as caught:
        load_machine("zzz")
    assert "did you mean" not in caught.value.try_


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ('{"name": "x"', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "wrong value"),
        ("7", "wrong value"),
        ("{}", "missing"),
        ('{"name": 7}', "wrong value"),
        ('{"name": "x", "memory_bytes": "much"}', "wrong value"),
        ('{"name": "x", "memory_bytes": NaN}', "wrong value"),
        ('{"name": "x", "memory_byte": 1}', "unknown key"),
        ('{"name": "x", "accelerators": [{"kind": "tpu"}]}', "wrong value"),
        ('{"machine": {"name": "x"}}', "missing"),
        ('{"machine": 7, "system_state": {}}', "wrong value"),
    ],
)
def test_the_error_for_a_malformed_file_names_it(tmp_path, text, says):
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_machine(file)
    assert says in caught.value.what
    assert "mine.json" in caught.value.what


def test_a_folder_or_device_is_rejected_as_machine_file(tmp_path):
    with pytest.raises(UsageError, match="plain file"):
        load_machine(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="plain file"):
        load_machine(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not text"):
        load_machine(tmp_path / "binary")
    with pytest.raises(UsageError, match="too large"):
        load_machine(write(tmp_path, " " * 1_000_001))
    for odd in ("a\0b", "x" * 5000, ""):
        with pytest.raises(UsageError):
            load_machine(odd)


def test_an_unreadable_machine_file_is_rejected(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path, "{}")
    monkeypatch.setattr(type(file), "read_text", denied)
    with pytest.raises(UsageError, match="cannot be read") as caught:
        load_machine(file)
    assert caught.value.got == "Permission denied"


@given(
    st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
)
def test_any_text_is_a_machine_or_a_clear_error(text):
    with pytest.raises(UsageError):
        parse_machine(text, where="here")


def test_every_chip_from_m1_to_m5_is_listed_once():
    names = [chip.name for chip in CHIPS]
    assert len(names) == len(set(names))
    for generation in range(1, 6):
        for size in ("", " Pro", " Max"):
            assert f"Apple M{generation}{size}" in names
    assert {"Apple M1 Ultra", "Apple M2 Ultra", "Apple M3 Ultra", "Apple A18 Pro"} <= set(names)
    assert "Apple M5 Ultra" not in names  # not announced


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_number_of_a_chip_has_a_source_and_is_plausible(chip):
    assert chip.generation.specs_source
    assert FAMILY_SOURCE
    low, high = chip.fp32_tflops
    per_gigahertz = chip.gpu_cores[-1] * 128 * 2 / 1000
    assert 1.2 < low / per_gigahertz <= high / per_gigahertz < 2.0  # the clock that the formula assumes, in GHz
    for several in (chip.cpu, chip.gpu_cores, chip.bandwidth):
        assert list(several) == sorted(several)


def test_find_chip_ignores_case_and_spaces():
    assert find_chip("Apple M2 Max").gpu_cores == (30, 38)
    assert find_chip(" apple  m2   max ").name == "Apple M2 Max"
    assert find_chip("M3").gpu_family == "apple9"
    assert find_chip("Apple M5 Pro").cpu == ((5, 10), (6, 12))
    for unknown in (None, "", "Apple", "Apple M9", "Intel(R) Core(TM) i7", "Apple M2 Maxx"):
        assert find_chip(unknown) is None
