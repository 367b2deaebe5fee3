"""Linux facts from /proc, /sys and control groups, and how much of the machine this process may use."""

import os
import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine_samples import sample
from whet.machine import linux
from whet.machine.facts import SystemState
from whet.machine.linux import PowerSupply

XEON = sample("linux", "cpuinfo-xeon.txt")
ARM = sample("linux", "cpuinfo-arm.txt")
MEMINFO = sample("linux", "meminfo.txt")


def test_cpuinfo_of_a_xeon():
    info = linux.parse_cpuinfo(XEON)
    assert info.name == "Intel(R) Xeon(R) Platinum 8480+"
    assert info.has_bf16 is True
    assert info.cores == {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1)}


def test_cpuinfo_of_an_arm_names_no_model_and_no_cores():
    assert linux.parse_cpuinfo(ARM) == linux.CpuInfo(None, True, None)


@pytest.mark.parametrize(
    ("flags", "has_bf16"),
    [("fpu avx512_bf16", True), ("amx_bf16 avx2", True), ("avx512f avx2", False), ("", None), ("bf16x", False)],
)
def test_bf16_is_read_from_the_flags(flags, has_bf16):
    assert linux.parse_cpuinfo(f"processor\t: 0\nflags\t\t: {flags}\n").has_bf16 is has_bf16


def test_one_core_without_bf16_means_no_bf16():
    assert linux.parse_cpuinfo(ARM.replace("i8mm bf16", "i8mm", 1)).has_bf16 is False


def test_meminfo_counts_in_bytes():
    result = linux.parse_meminfo(MEMINFO)
    assert result["MemTotal"] == 16303428 * 1024
    assert "HugePages_Total" not in result


def test_os_release():
    assert linux.parse_os_release(sample("linux", "os-release")) == "Ubuntu 24.04.2 LTS"
    assert linux.parse_os_release("NAME=Alpine\n") == "Alpine"
    assert linux.parse_os_release("ID=x\n") is None


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda text: linux.parse_cpuinfo(text)._asdict(), XEON),
        (linux.parse_meminfo, MEMINFO),
        (lambda text: {"name": linux.parse_os_release(text)}, sample("linux", "os-release")),
    ],
)
def test_truncated_at_every_character_a_fact_is_true_or_unknown(read, text):
    truth = read(text)
    for end in range(len(text)):
        for name, value in read(text[:end]).items():
            if name == "cores" and value:  # fewer processors: usable_cores then says "unknown", see below
                assert value.items() <= truth[name].items()
            else:
                assert value is None or value == truth[name], f"{name} = {value!r} after {end} characters"


@pytest.mark.parametrize(
    "read",
    [
        linux.parse_cpuinfo,
        linux.parse_meminfo,
        linux.parse_os_release,
        linux.parse_cgroup_membership,
        linux.parse_cpu_max,
        linux.parse_memory_limit,
        lambda text: linux.parse_memory_stat(text, "inactive_file"),
    ],
)
@given(
    text=st.one_of(st.text(), st.sampled_from([XEON, MEMINFO, "0::/a\n"]).flatmap(lambda t: st.permutations(t[:80])))
)
def test_any_text_never_crashes(read, text):
    read("".join(text))
    read(None)


def test_affinity_and_quota_decide_how_many_cores_count():
    cores = linux.parse_cpuinfo(XEON).cores
    everything = frozenset(range(4))
    assert linux.usable_cores(cores=cores, allowed=everything, quota=None) == (2, 4)
    assert linux.usable_cores(cores=cores, allowed=frozenset({0, 1}), quota=None) == (1, 2)
    assert linux.usable_cores(cores=cores, allowed=frozenset({0, 2}), quota=None) == (2, 2)
    assert linux.usable_cores(cores=cores, allowed=everything, quota=1.9) == (1, 1)
    assert linux.usable_cores(cores=cores, allowed=everything, quota=0.25) == (1, 1)
    assert linux.usable_cores(cores=None, allowed=everything, quota=3.0) == (None, 3)
    assert linux.usable_cores(cores=cores, allowed=None, quota=2.0) == (None, None)
    # /proc/cpuinfo is truncated: it lacks a processor that this process may use
    assert linux.usable_cores(cores={0: (0, 0)}, allowed=everything, quota=None) == (None, 4)


@pytest.mark.parametrize(
    ("supplies", "source"),
    [
        ([], None),
        ([PowerSupply("Mains", online="1")], "mains"),
        ([PowerSupply("Mains", online="0"), PowerSupply("Battery", status="Discharging")], "battery"),
        ([PowerSupply("Mains", online="1"), PowerSupply("Battery", status="Discharging")], "mains"),
        ([PowerSupply("Battery", status="Full")], "mains"),
        ([PowerSupply("Battery", status="Discharging", scope="Device")], None),
        ([PowerSupply("Battery", status="Unknown")], None),
        ([PowerSupply()], None),
    ],
)
def test_power_source(supplies, source):
    assert linux.power_source(supplies) == source


def tree(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_version_2_limits_of_all_levels_are_seen(tmp_path):
    group = "sys/fs/cgroup/user/job"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user/memory.max": f"{6 * 1024**3}\n",
            "sys/fs/cgroup/user/memory.current": f"{5 * 1024**3}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {2 * 1024**3}\n",
            f"{group}/cpu.max": "max 100000\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "4096\n",
        },
    )
    assert linux.read_cgroup_limits(root) == linux.CgroupLimits(1.5, 6 * 1024**3, 3 * 1024**3)


def test_version_1_limits_and_its_huge_number_for_none(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/job\n4:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1073741824\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert linux.read_cgroup_limits(root) == linux.CgroupLimits(2.0, 2147483648, 1073741824)


def test_no_limits_where_nothing_can_be_read(tmp_path):
    assert linux.read_cgroup_limits(tmp_path) == linux.CgroupLimits()
    root = tree(tmp_path, {"proc/self/cgroup": "0::/../../outside\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"})
    assert linux.read_cgroup_limits(root) == linux.CgroupLimits()


def test_a_machine_in_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": XEON,
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/memory.max": "4294967296\n",
            "sys/fs/cgroup/memory.current": "1294967296\n",
            "etc/os-release": sample("linux", "os-release"),
            "sys/class/power_supply/BAT0/type": "Battery\n",
            "sys/class/power_supply/BAT0/status": "Discharging\n",
            "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        },
    )
    machine = linux.linux_machine(root=root, architecture="x86_64")
    assert machine.chip == machine.cpu.name == "Intel(R) Xeon(R) Platinum 8480+"
    assert (machine.cpu.physical_cores, machine.cpu.logical_cores) == (2, 3)
    assert machine.memory_bytes == 4294967296
    assert (machine.os.name, machine.os.version) == ("Linux", "Ubuntu 24.04.2 LTS")
    assert linux.linux_system_state(root=root) == SystemState(
        memory_available_bytes=3000000000, swap_used_bytes=1048576 * 1024, power_source="battery"
    )
    assert linux.has_nvidia_card(root=root) is True


def test_an_nvidia_audio_function_is_not_a_gpu(tmp_path):
    assert linux.has_nvidia_card(root=tmp_path) is None
    device = "sys/bus/pci/devices/0000:01:00.1"
    root = tree(tmp_path, {f"{device}/class": "0x040300\n", f"{device}/vendor": "0x10de\n"})
    assert linux.has_nvidia_card(root=root) is False


def test_a_machine_that_cannot_be_read_is_unknown(tmp_path):
    machine = linux.linux_machine(root=tmp_path)
    assert (machine.chip, machine.memory_bytes, machine.os.version) == (None, None, None)
    assert linux.linux_system_state(root=tmp_path) == SystemState()


def test_files_that_are_no_text_are_unknown(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_bytes(b"model name\t: \xff\xfe\n")
    assert linux.linux_machine(root=tmp_path).chip is None


@pytest.mark.skipif(platform.system() != "Linux", reason="reads this machine's own /proc")
def test_this_machine():
    machine = linux.linux_machine()
    assert 1 <= machine.cpu.logical_cores <= len(os.sched_getaffinity(0))
    assert machine.memory_bytes > 2**28
