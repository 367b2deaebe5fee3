"""Draws of the code between steps do not move those of steps, for every generator, and both streams are saved."""

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from whet.device.cpu import CpuDevice
from whet.device.random_streams import RandomStreams, _has_known_layout
from whet.device.rng import seed_everything

pytestmark = pytest.mark.torch

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "torch normal": lambda: float(torch.randn(())),
    "python": random.random,
    "python gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": np.random.random,
    "numpy normal": np.random.randn,
}


@pytest.fixture(autouse=True)
def preserved_generators():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def streams(seed: int = 3) -> RandomStreams:
    seed_everything(seed)
    return RandomStreams(CpuDevice(), between_seed=77)


def step(run: RandomStreams, draw: Callable[[], float]) -> float:
    run.enter_step()
    value = draw()
    run.leave_step()
    return value


@pytest.mark.parametrize("name", DRAWS)
def test_draws_between_steps_do_not_move_those_of_steps(name: str) -> None:
    draw = DRAWS[name]
    undisturbed = streams()
    expected = [step(undisturbed, draw) for _ in range(7)]
    disturbed, steps, between = streams(), [], []
    for number in range(7):
        if number in (0, 2, 3, 6):
            # An odd number: generators of normal numbers cache every second one.
            between += [draw() for _ in range(number + 1)]
        steps.append(step(disturbed, draw))
    assert steps == expected
    # After the first ones, which come from the stream of steps, the numbers between steps are others.
    assert not {*between[1:]} & {*expected}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("draws_before", [0, 1])
def test_both_streams_are_restored(name: str, draws_before: int) -> None:
    draw = DRAWS[name]
    first = streams()
    for _ in range(3):
        step(first, draw)
        draw()
    for _ in range(draws_before):
        draw()
    saved = first.capture()
    expected = [value for _ in range(3) for value in (draw(), step(first, draw))]
    second = streams(seed=9)
    draw()
    second.restore(*saved)
    assert [value for _ in range(3) for value in (draw(), step(second, draw))] == expected


@pytest.mark.parametrize("name", DRAWS)
def test_saving_moves_no_draws(name: str) -> None:
    """Also right after the first draw between steps, which begins a stream of its own at the next step."""
    draw = DRAWS[name]

    def run(*, saves: bool) -> list[float]:
        own, values = streams(), []
        for _ in range(4):
            values.append(step(own, draw))
            values.append(draw())
            if saves:
                own.capture()
            values.append(draw())
        return values

    assert run(saves=True) == run(saves=False)


def test_the_stream_of_a_step_is_captured_inside_of_it() -> None:
    draw, own = DRAWS["torch"], streams()
    step(own, draw)
    draw()
    own.enter_step()
    saved = own.capture()
    expected = draw()
    own.leave_step()
    between = draw()
    other = streams(seed=9)
    other.restore(*saved)
    assert (step(other, draw), draw()) == (expected, between)


@pytest.mark.parametrize("name", DRAWS)
def test_a_rollback_inside_of_a_step_restores_both_streams(name: str) -> None:
    """Also right after the first draw between steps, whose stream begins at the next step."""
    draw = DRAWS[name]

    def run(*, rolls_back: bool) -> list[float]:
        own = streams()
        step(own, draw)
        draw()
        saved = own.capture()
        if rolls_back:
            own.enter_step()
            draw()
            own.restore(*saved)
            own.leave_step()
        return [value for _ in range(3) for value in (step(own, draw), draw())]

    assert run(rolls_back=True) == run(rolls_back=False)


WORDS: dict[str, Callable[[int], object]] = {
    "torch": lambda count: torch.empty(count, dtype=torch.int32).random_(),
    "python": lambda count: [random.getrandbits(32) for _ in range(count)],
    "numpy": lambda count: np.random.bytes(4 * count),
}
"""Functions that draw a number of 32-bit words."""


@pytest.mark.parametrize("name", WORDS)
def test_a_fingerprint_changes_with_every_draw_and_seed(name: str) -> None:
    """Also after 624 words, when the position of the generator is the same again."""
    seed_everything(3)
    generator = streams()._generators[name]
    seen = {generator.fingerprint()}
    for total, count in enumerate((1, 1, 622, 624, 1248, 623, 1), start=2):
        WORDS[name](count)
        seen.add(generator.fingerprint())
        assert len(seen) == total, f"{count} words changed nothing"
    generator.set(generator.seeded(4))
    seen.add(generator.fingerprint())
    assert len(seen) == total + 1


NORMALS: tuple[Callable[[], object], ...] = (
    lambda: torch.randn(()),
    lambda: torch.randn((), dtype=torch.float64),
    lambda: torch.randn(3),
    lambda: torch.empty(5).normal_(),
    lambda: torch.nn.functional.dropout(torch.ones(9)),
    lambda: torch.randperm(7),
)


@pytest.mark.parametrize("is_known", [True, False], ids=["memory", "state"])
def test_a_fingerprint_of_torch_changes_exactly_when_its_state_does(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single normal numbers are drawn in pairs: the second moves no word. Where the layout is unknown, all is read."""
    if not is_known:
        monkeypatch.setattr("whet.device.random_streams._has_known_layout", lambda: False)
    generator = streams()._generators["torch"]

    def same() -> None:
        torch.set_rng_state(torch.get_rng_state())

    for draw in (*NORMALS, *NORMALS[:2] * 3, same, *NORMALS, same, lambda: None):
        before, state = generator.fingerprint(), torch.get_rng_state()
        draw()
        assert (generator.fingerprint() == before) == torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(sys.platform != "linux", reason="the layout was seen on Linux only; elsewhere states may be copied")
def test_torch_of_this_version_has_the_known_layout() -> None:
    """Otherwise each step copies 5 kB three times: slower, not wrong."""
    assert _has_known_layout()


def test_states_of_a_step_are_those_of_the_generators() -> None:
    run = streams()
    run.enter_step()
    assert torch.equal(run.torch_states()[0], torch.get_rng_state())
    torch.rand(2)
    assert torch.equal(run.torch_states()[0], torch.get_rng_state())
    run.leave_step()
    torch.rand(5)
    assert torch.equal(run.torch_states()[0], torch.get_rng_state())
    run.enter_step()
    assert torch.equal(run.torch_states()[0], torch.get_rng_state())
