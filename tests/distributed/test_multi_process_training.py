"""Several real processes over gloo train what one process trains: gradients, weights, evaluations."""

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fork_server import TIMEOUT_SECONDS, ForkedProcess, ForkServer
from paths import SUPPORT
from rank_training_job import STEPS
from small_chat import prepared

pytestmark = pytest.mark.torch

JOB = SUPPORT / "rank_training_job.py"
RECIPES = ("text", "chat", "hex")
SHARDED = tuple(f"{name}-sharded" for name in RECIPES)

Together = Callable[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("world")
    words = ("fox", "fern", "flint")
    rows = [
        {"text": " ".join(["the"] * (number % 7) + [words[number % 3]]) + f" {number}", "label": words[number % 3]}
        for number in range(90)
    ]
    (path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepared(path)
    return path


def started(
    fork_server: ForkServer, names: tuple[str, ...], size: int, *, out: Path, steps: int = STEPS, fault: str = "none"
) -> list[ForkedProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [fork_server.start(JOB, rank, size, port, out, ",".join(names), steps, fault) for rank in range(size)]


@pytest.fixture(scope="module")
def together(fork_server: ForkServer, folder: Path) -> Together:
    """Runs scenes in `size` processes; their results are in the folder."""

    def run(names: tuple[str, ...], size: int, *, steps: int = STEPS, fault: str = "none", out: Path = folder) -> None:
        lives = started(fork_server, names, size, steps=steps, fault=fault, out=out)
        ended = [life.wait(seconds=600) for life in lives]
        assert [end.code for end in ended] == [0] * size, "\n".join(end.errors[-3000:] for end in ended)

    return run


@pytest.fixture(scope="module")
def trained(together: Together, folder: Path) -> Path:
    """Run the scenes of the gate once with one process and once with two."""
    together(("gradients", "left out", "evaluation", "draws", "bad numbers", "text"), 1)
    together(("gradients", "left out", "evaluation", "draws", "bad numbers", "text", "text-sharded"), 2)
    return folder


@pytest.fixture(scope="module")
def other_recipes(together: Together, folder: Path) -> None:
    together(RECIPES[1:], 1)
    together((*RECIPES[1:], *SHARDED[1:]), 2)


def tensors(folder: Path, name: str, size: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}-{size}.safetensors")


def numbers(folder: Path, name: str, size: int, rank: int = 0):
    return json.loads((folder / f"{name}-{size}-{rank}.json").read_text())


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the relative L2 distance over all trained weights.

    A softmax ignores the bias of its keys: the true gradient is zero, and Adam turns rounding errors into full steps.
    A single process with another split differs from itself by 2e-5 because of these alone.
    """
    assert ours.keys() == theirs.keys()
    for weights in (ours, theirs):
        for name in weights:
            if name.endswith("queries_keys_values.bias"):
                weights[name].chunk(3)[1].zero_()
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    return (apart / sum(float(tensor.double().square().sum()) for tensor in theirs.values())) ** 0.5


def largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_two_processes_have_the_gradients_of_one(trained: Path) -> None:
    one, two = (tensors(trained, "gradients", size) for size in (1, 2))
    assert len(one) == 3 * 6 * 4
    assert largest(two, one) < 1e-6
    logged = numbers(trained, "gradients", 1), numbers(trained, "gradients", 2)
    assert len(logged[0]) == 3 * 2
    assert logged[1] == pytest.approx(logged[0], abs=1e-6)
    assert numbers(trained, "gradients", 2, rank=1) == {}, "only rank 0 logs"


def test_parameters_that_some_steps_leave_out_have_the_gradients_of_one_process(trained: Path) -> None:
    """Or None where no rank reaches the parameter: AdamW would apply a step of zeros."""
    one, two = (tensors(trained, "left out", size) for size in (1, 2))
    reached = {name.partition("/")[0] for name in one if name.endswith("/rare.bias")}
    assert reached == {"1", "2", "3", "4", "6", "7", "8", "9", "10", "12"}
    assert largest(two, one) < 1e-5


@pytest.fixture(scope="module")
def own(together: Together, folder: Path) -> Path:
    together(("own", "own-choice"), 1)
    together(("own", "own-sharded-compiled"), 2)
    return folder


@pytest.fixture(scope="module")
def other_own(together: Together, own: Path) -> None:
    together(("own-sharded", "own-compiled"), 2)


@pytest.mark.parametrize(
    "name",
    [
        "own",
        "own-sharded-compiled",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("own-sharded", "own-compiled")),
    ],
)
def test_ranks_run_a_user_s_model_fused_compiled_and_sharded_like_one_process(
    own: Path, name: str, request: pytest.FixtureRequest
) -> None:
    if name in ("own-sharded", "own-compiled"):
        request.getfixturevalue("other_own")
    alone = tensors(own, "own-choice" if "sharded" in name else "own", 1)
    assert distance(tensors(own, name, 2), alone) < 1e-6
    for rank in range(2):
        ran = numbers(own, name, 2, rank)
        assert (ran["optimizer_kernels"], ran["was_fused"]) == ("fused", True)
        assert ran["sharding"] == ("full" if "sharded" in name else "off")
        assert ran["compile"] == ("blocks" if "compiled" in name else "off")
        assert (ran["graphs"] > 0) == ("compiled" in name)


@pytest.mark.parametrize(
    "name", ["text", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "text")]
)
def test_replicated_and_sharded_weights_are_those_of_one_process(
    trained: Path, name: str, request: pytest.FixtureRequest
) -> None:
    if name != "text":
        request.getfixturevalue("other_recipes")
    one = tensors(trained, name, 1)
    for kind in (name, f"{name}-sharded"):
        assert distance(tensors(trained, kind, 2), one) < 1e-5
        same = numbers(trained, kind, 2), numbers(trained, kind, 2, rank=1)
        assert same[0] == same[1], "all ranks have the metrics"
        assert same[0] == pytest.approx(numbers(trained, name, 1), rel=1e-4, abs=1e-4)


def test_an_evaluation_sees_every_sample_once(trained: Path) -> None:
    for result in numbers(trained, "evaluation", 2), numbers(trained, "evaluation", 2, rank=1):
        for number, results in ((7, result[:4]), (1, result[4:])):
            for shared, alone in (results[:2], results[2:]):
                assert shared == {"seen": number, "different": number, "most": -(-number // 2)}
                assert alone == {"seen": number}


def test_all_ranks_roll_back_and_skip_the_same_step(trained: Path) -> None:
    one, two = (tensors(trained, "bad numbers", size) for size in (1, 2))
    assert all(bool(tensor.isfinite().all()) for tensor in two.values())
    assert distance(two, one) < 1e-6
    logged = numbers(trained, "bad numbers", 1)
    assert sorted(logged) == ["resume", "skip"]
    assert numbers(trained, "bad numbers", 2) == logged


def test_processes_draw_differently_and_the_same_again(trained: Path) -> None:
    first, second = (numbers(trained, "draws", 2, rank=rank) for rank in (0, 1))
    assert len(first) == 8
    assert first[:4] == first[4:]
    assert len({*first, *second}) == 8


@pytest.mark.parametrize(
    "fault",
    ["averaged", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("own weights", "stand-ins count"))],
)
def test_a_wrong_sum_is_found(trained: Path, together: Together, tmp_path: Path, fault: str) -> None:
    together(("gradients",), 2, fault=fault, out=tmp_path)
    assert largest(tensors(tmp_path, "gradients", 2), tensors(trained, "gradients", 1)) > 1e-3


def test_a_zero_gradient_that_no_rank_has_is_detected(trained: Path, together: Together, tmp_path: Path) -> None:
    together(("left out",), 2, fault="zeros stay", out=tmp_path)
    assert tensors(tmp_path, "left out", 2).keys() > tensors(trained, "left out", 1).keys()


@pytest.mark.slow
def test_a_sample_that_is_seen_twice_is_found(together: Together, tmp_path: Path) -> None:
    together(("evaluation",), 2, fault="everybody sees all", out=tmp_path)
    assert numbers(tmp_path, "evaluation", 2)[0]["seen"] == 14


def test_a_stop_signal_to_one_rank_stops_all_after_the_same_step(fork_server: ForkServer, tmp_path: Path) -> None:
    lives = started(fork_server, ("endless",), 2, out=tmp_path)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all((tmp_path / f"began-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lives[1].send(signal.SIGTERM)
    assert [life.wait().code for life in lives] == [0, 0]
    first, second = (numbers(tmp_path, "endless", 2, rank=rank) for rank in (0, 1))
    assert first == second
    assert first[:2] == ["stopped", 143]


def test_a_process_that_fails_takes_the_others_along(fork_server: ForkServer, tmp_path: Path) -> None:
    first, second = started(fork_server, ("one fails",), 2, out=tmp_path)
    failed = second.wait()
    begun = time.monotonic()
    lost = first.wait()
    assert (failed.code, lost.code) == (1, 1)
    assert time.monotonic() - begun < 10
    assert "the disk of the second process is gone" in failed.errors
    # Either its connection closes or its heartbeat is missed first.
    assert "another rank exited" in lost.errors or "rank 1 of 2 has ended" in lost.errors


@pytest.fixture(scope="module")
def long(together: Together, folder: Path) -> Path:
    out = folder / "long"
    out.mkdir()
    for name in ("texts.jsonl", "prepared"):
        (out / name).symlink_to(folder / name)
    together(RECIPES, 1, steps=100, out=out)
    together((*RECIPES, *SHARDED), 2, steps=100, out=out)
    together((*RECIPES, *SHARDED), 4, steps=100, out=out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_a_hundred_steps_of_two_and_four_processes_are_those_of_one(
    long: Path, name: str, size: int, report_count: Callable[[str], None]
) -> None:
    apart = [distance(tensors(long, kind, size), tensors(long, name, 1)) for kind in (name, f"{name}-sharded")]
    report_count(f"{name}, {size} processes: replicated {apart[0]:.1e}, sharded {apart[1]:.1e}")
    assert max(apart) < 1e-5
    assert numbers(long, name, 1)["moved"] > 0.01, "weights that hardly change would agree anyway"
