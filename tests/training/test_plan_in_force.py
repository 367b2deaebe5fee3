"""A run executes what its plan says, also where the environment has decided."""

from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from small_models import convnet, images
from whet.base.errors import UsageError
from whet.training.callback import Callback

pytestmark = pytest.mark.torch


class Observer(Callback):
    """Keeps the plan, and what is in force in a step."""

    def on_start(self, run: Any) -> None:
        self.plan = run.plan

    def before_step(self, state: Any) -> None:
        self.threads = torch.get_num_threads()
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()


def observe(run: Path | None = None, *, max_steps: int = 2, on_event: Any = None, **overrides: Any) -> Observer:
    torch.manual_seed(0)
    model, observer = convnet(), Observer()
    whet.train(
        model,
        images(16, seed=0),
        loss=lambda micro: torch.nn.functional.cross_entropy(model(micro.x), micro.y),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=8,
        max_steps=max_steps,
        epochs=9,
        measure=False,
        on_event=on_event,
        device="cpu",
        run=run,
        overrides={"micro_batch": 8, **overrides},
        callbacks=[observer],
    )
    return observer


def test_the_threads_of_the_environment_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(number))
        seen = observe()
        setting = seen.plan.settings["threads"]
        assert (setting.value, setting.source, seen.threads) == (number, "environment", number)
    assert observe(threads=1).threads == 1, "the user's override wins"


def test_deterministic_kernels_that_are_on_stay_on_and_are_planned() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        seen = observe()
        assert (seen.plan.deterministic, seen.plan.settings["deterministic"].source) == ("on", "environment")
        assert seen.is_deterministic
        off = observe(deterministic="off")
        assert (off.plan.deterministic, off.is_deterministic) == ("off", False)
        assert torch.are_deterministic_algorithms_enabled(), "restored"
    finally:
        torch.use_deterministic_algorithms(before)
    assert observe().plan.settings["deterministic"].source == "rule"


def test_a_compiler_that_is_disabled_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert observe().plan.settings["compile"].source == "environment"
    with pytest.raises(UsageError, match="compile is fixed by the environment"):
        observe(compile="on")


def test_a_resumed_run_shows_what_is_in_force_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert observe(tmp_path / "run").plan.settings["compile"].source == "rule"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert observe(tmp_path / "run", max_steps=4).plan.settings["compile"].source == "environment"
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    assert observe(tmp_path / "run", max_steps=6).plan.settings["compile"].source == "rule"


@pytest.mark.parametrize("name", ["accumulation", "gradient_accumulation_steps"])
def test_accumulation_follows_from_the_micro_batch(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a setting") as refused:
        observe(tmp_path / "run", **{name: 4})
    assert "global_batch_size / micro_batch" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_an_override_without_effect_is_in_the_warnings_and_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = observe(tmp_path / "run", on_event="line", mps_fallback="on")
    assert "mps_fallback: your on has no effect: only MPS has it" in capsys.readouterr().err
    assert seen.plan.mps_fallback == "off"
    assert any("your on has no effect" in line for line in whet.summarize(tmp_path / "run").warnings)
    assert observe(tmp_path / "run", max_steps=4, mps_fallback="on").plan.mps_fallback == "off", "the same call resumes"


@pytest.mark.parametrize("split_batch", ["auto", False, True])
def test_a_micro_batch_with_batchnorm_is_executed_or_refused(split_batch: Any, tmp_path: Path) -> None:
    x, y = images(32, seed=0)
    sizes: list[int] = []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(x[0].numel()), torch.nn.LazyLinear(10))
    model(x)

    def loss(batch: Any) -> torch.Tensor:
        sizes.append(len(batch[1]))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train() -> Any:
        observer = Observer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = {"global_batch_size": 16, "split_batch": split_batch, "overrides": {"micro_batch": 4}}
        keywords: Any = {"run": tmp_path / "run", "callbacks": [observer], "on_event": None, "measure": False}
        whet.train(model, (x, y), loss=loss, optimizer=optimizer, **options, **keywords)
        return observer.plan

    if split_batch is True:
        plan = train()
        assert (plan.micro_batch, set(sizes)) == (4, {4})
        assert any("BatchNorm" in line for line in plan.warnings)
    else:
        with pytest.raises(UsageError, match="micro_batch=4 would change what is trained"):
            train()
        assert not (tmp_path / "run").exists()
