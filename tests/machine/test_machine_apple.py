"""Every macOS parser reads good samples exactly, and returns unknown facts for anything else."""

import random
from functools import lru_cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from machine_samples import FILES, answering, sample, silent
from whet.base.units import GB
from whet.machine import apple
from whet.machine import apple as parse
from whet.machine.apple import AppleGpu, CoreClusters, MacHardware
from whet.machine.facts import Accelerator, Machine

MACS = ("m2-air", "m5-pro", "intel")


def read_sysctl(text):
    result = parse.parse_sysctl(text)
    clusters = parse.core_clusters(result)
    return {
        **{name: result.get(name) for name in ("machdep.cpu.brand_string", "hw.memsize", "hw.physicalcpu")},
        "fast": clusters.fast,
        "slow": clusters.slow,
        "bf16": parse.parse_flag(result, "hw.optional.arm.FEAT_BF16"),
        "wired": parse.parse_wired_limit(result),
    }


READERS = {
    "sysctl.txt": read_sysctl,
    "ioreg.plist": lambda text: parse.parse_ioreg(text)._asdict(),
    "system_profiler.json": lambda text: parse.parse_hardware(text)._asdict(),
    "pmset-batt.txt": lambda text: {"source": parse.parse_power_source(text)},
    "pmset.txt": lambda text: {"low": parse.parse_low_power(text)},
    "sw_vers.txt": lambda text: {"version": parse.parse_sw_vers(text)},
}
CASES = [(machine, file) for machine in MACS for file in READERS]


@lru_cache
def text_of(machine, file):
    return sample(machine, file)


def answers(machine, **change):
    return apple.read_mac(run=answering(machine, **change))


def test_every_sample_file_has_a_reader():
    assert set(READERS) == set(FILES.values())


def test_m2_air_is_read_exactly():
    result = answers("m2-air")
    machine = apple.mac_machine(result, architecture="arm64")
    assert machine.model == "MacBook Air (Mac14,2)"
    assert machine.chip == "Apple M2"
    assert machine.is_fanless is True
    assert (machine.os.name, machine.os.version, machine.os.architecture) == ("macOS", "15.1", "arm64")
    cpu = machine.cpu
    assert (cpu.physical_cores, cpu.logical_cores, cpu.fast_cores, cpu.slow_cores) == (8, 8, 4, 4)
    assert cpu.has_bf16 is True
    assert machine.memory_bytes == 8 * GB


def test_m5_pro_counts_super_cores_as_fast_and_all_others_as_slow():
    result = answers("m5-pro")
    machine = apple.mac_machine(result, architecture="arm64")
    assert (machine.cpu.fast_cores, machine.cpu.slow_cores) == (5, 10)
    assert machine.is_fanless is False
    assert machine.memory_bytes == 24 * GB
    assert result.gpu == AppleGpu("Apple M5 Pro", 16, 0.0)


def test_intel_mac_is_read_exactly():
    result = answers("intel")
    machine = apple.mac_machine(result, architecture="x86_64")
    assert machine.chip == "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz"
    assert (machine.cpu.physical_cores, machine.cpu.logical_cores) == (6, 12)
    assert (machine.cpu.fast_cores, machine.cpu.slow_cores, machine.cpu.has_bf16) == (None, None, None)
    assert apple.has_apple_silicon(result) is False
    assert result.gpu == AppleGpu()


def test_three_levels_are_summed_and_a_missing_one_is_not_guessed():
    three = {f"hw.perflevel{n}.physicalcpu": str(n + 2) for n in range(3)} | {"hw.nperflevels": "3"}
    assert parse.core_clusters(three) == CoreClusters(2, 7)
    del three["hw.perflevel1.physicalcpu"]
    assert parse.core_clusters(three) == CoreClusters(2, None)
    assert parse.core_clusters({"hw.nperflevels": "1", "hw.perflevel0.physicalcpu": "6"}) == CoreClusters(6, 0)
    assert parse.core_clusters({"hw.perflevel0.physicalcpu": "4", "hw.perflevel1.physicalcpu": "4"}) == CoreClusters(
        4, None
    )
    assert parse.core_clusters({"hw.nperflevels": "999999999"}) == CoreClusters(None, None)


def test_a_name_given_twice_with_two_values_is_unknown():
    assert parse.parse_sysctl("hw.ncpu: 8\nhw.ncpu: 9\nhw.model: Mac14,2\n") == {"hw.model": "Mac14,2"}


def test_rosetta_does_not_hide_the_chip():
    def translated(text):
        text = text.replace("brand_string: Apple M2", "brand_string: VirtualApple @ 2.50GHz processor")
        return text.replace("proc_translated: 0", "proc_translated: 1").replace("arm64: 1", "arm64: 0")

    result = answers("m2-air", change=translated)
    assert apple.mac_machine(result, architecture="x86_64").chip == "Apple M2"
    assert apple.has_apple_silicon(result) is True
    assert apple.has_apple_silicon(result._replace(hardware=MacHardware())) is True


def test_the_accelerator_takes_torchs_numbers_first():
    result = answers("m5-pro")
    machine = apple.mac_machine(result, architecture="arm64")
    by_torch = apple.mac_accelerator(result, machine=machine, recommended_bytes=19 * GB, num_cores=20)
    assert by_torch == Accelerator(
        kind="mps",
        name="Apple M5 Pro",
        num_cores=20,
        memory_bytes=24 * GB,
        usable_bytes=19 * GB,
        shares_memory=True,
        capability="apple10",
    )
    without = apple.mac_accelerator(result, machine=machine, recommended_bytes=None, num_cores=None)
    assert (without.num_cores, without.usable_bytes) == (16, 20 * GB)
    m2 = answers("m2-air")
    unlimited = apple.mac_accelerator(
        m2, machine=apple.mac_machine(m2, architecture="arm64"), recommended_bytes=None, num_cores=None
    )
    assert unlimited.usable_bytes is None


def test_a_mac_without_any_program_is_unknown_not_broken():
    result = apple.read_mac(run=silent)
    machine = apple.mac_machine(result, architecture="arm64")
    assert machine == Machine(name="this machine", os={"name": "macOS", "architecture": "arm64"})
    assert apple.has_apple_silicon(result) is None


@pytest.mark.parametrize("missing", ["sysctl.txt", "ioreg.plist", "system_profiler.json", "sw_vers.txt"])
def test_one_missing_program_leaves_the_others_facts(missing):
    whole = answers("m2-air")

    def run(command, *, any_exit=False):
        from machine_samples import file_of

        return None if file_of(command) == missing else answering("m2-air")(command)

    part = apple.read_mac(run=run)
    changed = [name for name in whole._fields if getattr(part, name) != getattr(whole, name)]
    assert len(changed) == 1


def test_no_serial_number_survives():
    result = answers("m2-air")
    shown = str(apple.mac_machine(result, architecture="arm64")) + str(result)
    assert "MADEUPSERIAL" not in shown
    assert "00000000-0000" not in shown


@pytest.mark.parametrize(("machine", "file"), CASES)
def test_truncated_at_every_character_a_fact_is_true_or_unknown(machine, file):
    text, read = text_of(machine, file), READERS[file]
    truth = read(text)
    for end in range(len(text)):
        for name, value in read(text[:end]).items():
            assert value is None or value == truth[name], f"{name} = {value!r} after {end} characters"


@pytest.mark.parametrize(("machine", "file"), CASES)
def test_with_lines_missing_a_fact_is_true_or_unknown(machine, file):
    lines, read = text_of(machine, file).splitlines(keepends=True), READERS[file]
    truth = read("".join(lines))
    chance = random.Random(0)
    fewer = [lines[:i] + lines[i + 1 :] for i in range(len(lines))]
    fewer += [[line for line in lines if chance.random() < 0.7] for _ in range(50)]
    for kept in fewer:
        for name, value in read("".join(kept)).items():
            assert value is None or value == truth[name], f"{name} = {value!r} in {kept}"


@pytest.mark.parametrize(("machine", "file"), CASES)
@given(data=st.data())
def test_replaced_characters_never_crash(machine, file, data):
    text = text_of(machine, file)
    changed = list(text)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        changed[at] = data.draw(st.characters())
    _assemble("".join(changed), file=file, machine=machine)


@given(text=st.text(), file=st.sampled_from(sorted(READERS)))
@example(text="[" * 100_000, file="system_profiler.json")
@example(text='{"SPHardwareDataType": [[]]}', file="system_profiler.json")
@example(text='{"SPHardwareDataType": [{"physical_memory": 8, "machine_name": ["x"]}]}', file="system_profiler.json")
@example(text='{"SPHardwareDataType": {}}', file="system_profiler.json")
@example(text="<plist><array><string>x</string></array></plist>", file="ioreg.plist")
@example(text="<plist><dict/></plist>", file="ioreg.plist")
@example(text="<plist><date>x</date></plist>", file="ioreg.plist")
@example(text="<plist><integer>x</integer></plist>", file="ioreg.plist")
@example(text="bplist00\x00", file="ioreg.plist")
@example(text='<!DOCTYPE p [<!ENTITY a "b">]><plist><string>&a;</string></plist>', file="ioreg.plist")
def test_any_text_never_crashes(text, file):
    _assemble(text, file=file, machine="m2-air")


@given(raw=st.binary(max_size=300), file=st.sampled_from(sorted(READERS)))
def test_binary_garbage_never_crashes(raw, file):
    _assemble(raw.decode("latin-1"), file=file, machine="m2-air")


def _assemble(text, *, file, machine):
    """All the way to the records, whose types are checked when they are made."""

    def run(command, *, any_exit=False):
        from machine_samples import file_of

        return text if file_of(command) == file else text_of(machine, file_of(command))

    result = apple.read_mac(run=run)
    mac = apple.mac_machine(result, architecture="arm64")
    apple.mac_accelerator(result, machine=mac, recommended_bytes=None, num_cores=None)
    assert mac.chip is None or mac.chip.isprintable()
    assert mac.memory_bytes is None or mac.memory_bytes > 0


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse.parse_power_source, "Strom wird gerade bezogen von 'Netzteil'\n"),
        (parse.parse_power_source, "Alimentation : 'Batterie'\n"),
        (parse.parse_low_power, " Stromsparmodus         1\n"),
        (parse.parse_low_power, " lowpowermode         an\n"),
        (parse.parse_low_power, " lowpowermode  0\n powermode  1\n"),
        (parse.parse_sw_vers, "Produktversion:\t15.1\n"),
        (parse.parse_sw_vers, "ProductVersion:\t١٥.١\n"),
        (lambda text: parse.parse_hardware(text).memory_bytes, '{"SPHardwareDataType": [{"physical_memory": "8 Go"}]}'),
        (lambda text: parse.parse_hardware(text).memory_bytes, '{"SPHardwareDataType": [{"physical_memory": "0 GB"}]}'),
    ],
)
def test_other_languages_and_odd_values_are_unknown(read, text):
    assert read(text) is None


def test_utilization_out_of_range_and_booleans_are_unknown():
    text = text_of("m2-air", "ioreg.plist")
    assert parse.parse_ioreg(text.replace("<integer>17<", "<integer>101<")).busy_percent is None
    assert parse.parse_ioreg(text.replace("<integer>10<", "<integer>-1<")) == AppleGpu()
    assert parse.parse_ioreg(text.replace("<integer>10</integer>", "<true/>")) == AppleGpu()


@pytest.mark.parametrize(
    ("name", "chip", "fanless"),
    [
        ("MacBook Air", "Apple M1", True),
        ("MacBook Neo", "Apple A18 Pro", True),
        ("MacBook Air", "Intel(R) Core(TM) i5", False),
        ("MacBook Air", None, None),
        ("MacBook Pro", "Apple M2", False),
        ("Mac mini", None, False),
        ("MacBook", "Intel(R) Core(TM) m3", None),
        ("MacBook Luft", "Apple M2", None),
        (None, "Apple M2", None),
    ],
)
def test_fanless_is_known_by_name_only(name, chip, fanless):
    assert parse.is_fanless(name=name, chip=chip) is fanless


class FakeLibc:
    def __init__(self, *, state=2, register=0, get=0):
        self.state, self.register, self.get, self.cancelled = state, register, get, 0

    def notify_register_check(self, key, token):
        return self.register

    def notify_get_state(self, token, state):
        state._obj.value = self.state
        return self.get

    def notify_cancel(self, token):
        self.cancelled += 1


def test_thermal_pressure_is_read_and_the_token_given_back():
    libc = FakeLibc(state=2)
    assert parse.thermal_level(apple.thermal_pressure(libc=libc)) == "heavy"
    assert libc.cancelled == 1
    assert apple.thermal_pressure(libc=FakeLibc(register=1)) is None
    assert apple.thermal_pressure(libc=FakeLibc(get=1)) is None
    assert apple.thermal_pressure(libc=object()) is None
    assert parse.thermal_level(5) is None
    assert parse.thermal_level(None) is None


def test_hardware_reads_terabytes():
    assert parse.parse_hardware('{"SPHardwareDataType": [{"physical_memory": "1 TB"}]}') == MacHardware(
        memory_bytes=1024 * GB
    )
