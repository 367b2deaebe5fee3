"""The plan shows what is executed: variables of the environment, overrides without effect, settings that are read."""

import ast
from pathlib import Path

import pytest

import whet
from whet.base.errors import UsageError
from whet.machine.environment import read_environment
from whet.machine.facts import CpuFacts, EnvironmentFacts, Machine, OperatingSystem, SystemState
from whet.machine.known import load_machine
from whet.plan.environment import forced_value
from whet.plan.plan import Plan, make_plan, override
from whet.plan.rule import RuleContext
from whet.plan.setting import MeasuredSetting
from whet.plan.values import SETTING_NAMES, names_of
from whet.plan.workload import Workload

MAC = load_machine("m2-air-8gb")
PC = Machine(name="a PC", os=OperatingSystem(name="Linux"), cpu=CpuFacts(physical_cores=8, logical_cores=16))
TEXT = Workload(recipe="text", num_parameters=1_000_000, global_batch_size=32)


def plan(machine: Machine = PC, *, overrides=None, measured=None, workload: Workload = TEXT, **facts) -> Plan:
    state = SystemState(environment=EnvironmentFacts(**facts))
    return make_plan(machine, workload, overrides=overrides, measured=measured, system_state=state)


# --- every setting is executed ----------------------------------------------------------------------------------------


def read_names(root: Path) -> set[str]:
    """The settings that code outside plan/, report/ and config/ reads as `plan.NAME`, on any object called plan."""
    found: set[str] = set()
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] in ("plan", "report", "config"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                found |= {node.attr} if owner in ("plan", "_plan") else set()
    return found


def test_every_setting_is_read_by_code_that_executes_it() -> None:
    unread = set(SETTING_NAMES) - read_names(Path(whet.__file__).parent)
    assert unread == set(), "a setting that nothing reads is a defect"


def test_a_setting_that_nothing_reads_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "rules.py").write_text("plan.in_rules")
    (tmp_path / "step.py").write_text(
        "def f(plan, run):\n    plan.unused = 1\n    return plan.one, run.plan.two, other.three"
    )
    assert read_names(tmp_path) == {"one", "two"}


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "facts", "values"),
    [
        (PC, {"threads": 3, "threads_variable": "OMP_NUM_THREADS"}, {"threads": 3}),
        (PC, {"is_deterministic": True}, {"deterministic": "on"}),
        (PC, {"compile_disabled_by": "TORCHDYNAMO_DISABLE"}, {"compile": "off"}),
        (PC, {"compile_disabled_by": "DISABLE_COMPILE"}, {"compile": "off"}),
        (PC, {"malloc_variable": "MALLOC_TOP_PAD_"}, {"freed_memory": "returned"}),
        (MAC, {"mps_fallback": True}, {"mps_fallback": "on"}),
        (MAC, {"mps_fallback": False}, {"mps_fallback": "off"}),
        (MAC, {"mps_high_watermark": 0.7, "mps_low_watermark": 0.5}, {"high_watermark": 0.7, "low_watermark": 0.5}),
        (MAC, {"mps_high_watermark": 1.5}, {"high_watermark": 1.5, "low_watermark": 1.4}),
    ],
)
def test_what_the_environment_fixes_is_in_the_plan(machine: Machine, facts: dict, values: dict) -> None:
    made = plan(machine, **facts)
    for name, value in values.items():
        setting = made.settings[name]
        assert (setting.value, setting.source) == (value, "environment"), name
        assert setting.evidence["origin"] in setting.reason
    others = {name for name, setting in made.settings.items() if setting.source == "environment"} - {*values}
    assert others == set()
    context = RuleContext(
        machine=machine, system_state=made.system_state, workload=made.workload, settings=made.settings
    )
    finals = {name for name in SETTING_NAMES if (forced := forced_value(name, context)) and forced.is_final}
    assert finals <= set(names_of(lambda setting: setting.is_final)), "a resume takes their current values"


def test_watermarks_that_whet_has_set_itself_are_a_rule() -> None:
    made = plan(MAC, mps_high_watermark=1.0, mps_low_watermark=0.9)
    assert (made.high_watermark, made.settings["high_watermark"].source) == (1.0, "rule")
    assert plan(PC).high_watermark is None


def test_variables_of_mps_do_nothing_elsewhere() -> None:
    made = plan(PC, mps_fallback=True, mps_high_watermark=0.0, mps_low_watermark=0.0)
    assert {setting.source for setting in made.settings.values()} == {"rule"}


def test_no_limit_of_memory_is_warned_of() -> None:
    assert any("removes the limit" in line for line in plan(MAC, mps_high_watermark=0.0).warnings)


def test_the_order_is_rule_measured_environment_you() -> None:
    facts = {"threads": 3, "threads_variable": "OMP_NUM_THREADS"}
    measured = {"threads": MeasuredSetting(value=2, reason="faster", evidence={})}
    assert (plan().threads, plan(measured=measured).threads) == (8, 2)
    assert plan(measured=measured, **facts).threads == 3
    assert plan(measured=measured, overrides={"threads": 5}, **facts).threads == 5
    assert override(plan(**facts), {"precision": "fp32"}).threads == 3, "a plan that is made again keeps it"


def test_a_variable_that_torch_does_not_read_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_COMPILE", "1")
    named = read_environment().compile_disabled_by
    assert named == "DISABLE_COMPILE"
    assert plan(compile_disabled_by=named, overrides={"compile": "on"}).compile == "on"


def test_how_threads_wait_is_named_if_the_user_has_chosen() -> None:
    assert "wait" not in plan(PC).settings["threads"].reason
    reason = plan(PC, wait_variable="GOMP_SPINCOUNT=0", overrides={"device": "cpu"}).settings["threads"].reason
    assert reason.endswith("they wait as your GOMP_SPINCOUNT=0 says")
    assert "wait" not in plan(MAC, wait_variable="KMP_BLOCKTIME=0").settings["threads"].reason, "the GPU computes"


def test_torchrun_does_not_decide_the_threads() -> None:
    facts = {"threads": 1, "threads_variable": "OMP_NUM_THREADS"}
    many = TEXT.model_copy(update={"world_size": 2, "local_size": 2})
    assert plan(workload=many, **facts).settings["threads"].source == "rule"
    assert plan(workload=many, threads=2, threads_variable="OMP_NUM_THREADS").threads == 2


@pytest.mark.parametrize(
    ("machine", "facts", "overrides"),
    [
        (PC, {"compile_disabled_by": "TORCH_COMPILE_DISABLE"}, {"compile": "on"}),
        (MAC, {"mps_fallback": True}, {"mps_fallback": "off"}),
        (MAC, {"mps_high_watermark": 0.7, "mps_low_watermark": 0.5}, {"high_watermark": 1.0}),
        (PC, {"malloc_variable": "MALLOC_TOP_PAD_"}, {"freed_memory": "kept"}),
    ],
)
def test_an_override_that_the_environment_prevents_is_refused(machine: Machine, facts: dict, overrides: dict) -> None:
    with pytest.raises(UsageError, match="is fixed by the environment") as refused:
        plan(machine, overrides=overrides, **facts)
    assert "unset " in str(refused.value.try_)
    same = {name: plan(machine, **facts).settings[name].value for name in overrides}
    assert plan(machine, overrides=same, **facts).settings[next(iter(same))].source == "you"


def test_what_torch_can_still_change_is_the_users() -> None:
    assert plan(is_deterministic=True, overrides={"deterministic": "off"}).deterministic == "off"


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLIBC_TUNABLES", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    assert read_environment() == EnvironmentFacts()
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    assert (read_environment().threads, read_environment().threads_variable) == (7, "MKL_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.7")
    monkeypatch.setenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", "much")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert read_environment(is_deterministic=True) == EnvironmentFacts(
        mps_fallback=True,
        mps_high_watermark=0.7,
        threads=4,
        threads_variable="OMP_NUM_THREADS",
        compile_disabled_by="TORCHDYNAMO_DISABLE",
        malloc_variable="MALLOC_TOP_PAD_",
        wait_variable="GOMP_SPINCOUNT=0",
        is_deterministic=True,
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
    assert (read_environment().threads, read_environment().mps_fallback) == (7, False)


# --- overrides that nothing executes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        ({"accumulation": 4}, "accumulation is not a setting", "global_batch_size / micro_batch"),
        ({"accumulation_steps": 4}, "accumulation_steps is not a setting", "micro_batch=N"),
        ({"pin_memory": "on"}, "pin_memory is not a setting", "copies=overlapped"),
        ({"micro_batches": 4}, "no such setting", "micro_batch"),
        ({"xyzzy": 4}, "no such setting", " or "),
    ],
)
def test_an_override_that_is_no_setting_is_refused(overrides: dict, what: str, hint: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        plan(overrides=overrides)
    assert hint in str(refused.value.try_)


@pytest.mark.parametrize(
    ("overrides", "executed"),
    [
        ({"mps_fallback": "on"}, "off"),
        ({"high_watermark": 0.5}, None),
        ({"keep_awake": "on"}, "unused"),
        ({"precision": "tf32"}, "fp32"),
        ({"copies": "overlapped"}, "blocking"),
        ({"sharding": "full"}, "unused"),
        ({"bucket_mb": 10}, None),
    ],
)
def test_an_override_without_effect_is_said_plainly(overrides: dict, executed: object) -> None:
    ((name, asked),) = overrides.items()
    made = plan(overrides=overrides)
    assert (made.settings[name].value, made.settings[name].source) == (executed, "rule")
    assert any(f"{name}: your {asked} has no effect" in line for line in made.warnings)
    assert made.overrides == overrides, "a run that moves to another device still has it"
    assert f"your {asked} has no effect" in str(made)


def test_an_override_that_the_device_executes_has_no_such_note() -> None:
    made = plan(MAC, overrides={"mps_fallback": "on"})
    assert (made.mps_fallback, made.settings["mps_fallback"].source) == ("on", "you")
    assert not any("no effect" in line for line in made.warnings)
