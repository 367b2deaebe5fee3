"""Output of nvidia-smi: several cards, unknown values, no driver, a driver without a card."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.machine.nvidia import NO_DRIVER, NvidiaCard, NvidiaCards, parse_cards, query_driver

TWO = "NVIDIA H200, 143771, 580.65.06, 9.0\nNVIDIA GeForce RTX 4090, 24564, 580.65.06, 8.9\n"
FIRST = NvidiaCard("NVIDIA H200", 143771 * 1024**2, "580.65.06", "9.0")
SECOND = NvidiaCard("NVIDIA GeForce RTX 4090", 24564 * 1024**2, "580.65.06", "8.9")
FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n\n"
OLD_FIELD = 'Field "compute_cap" is not a valid field to query.\n\n'


def test_several_cards():
    assert parse_cards(TWO) == NvidiaCards("working", (FIRST, SECOND))


def test_unavailable_values_of_a_card_are_unknown():
    text = "Orin (nvgpu), [N/A], 540.4.0, [Not Supported]\n"
    assert parse_cards(text) == NvidiaCards("working", (NvidiaCard("Orin (nvgpu)", None, "540.4.0"),))


def test_a_comma_belongs_to_the_name():
    assert parse_cards("Made, Up, 100, 540.4.0, 9.0\n").cards[0].name == "Made, Up"


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (None, "missing"),
        (FAILED, "not running"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "not running"),
        ("", "not running"),
        ("No devices were found\n", "no card"),
        (TWO, "working"),
    ],
)
def test_missing_driver_failing_driver_and_missing_card_differ(text, driver):
    assert parse_cards(text).driver == driver


def asked(answers):
    commands = []

    def run(command, *, any_exit=False):
        assert any_exit  # nvidia-smi ends with an error code when it finds no card
        commands.append(command)
        return answers[len(commands) - 1]

    return query_driver(run=run), commands


def test_an_old_driver_is_queried_again_without_compute_cap():
    result, commands = asked([OLD_FIELD, "Tesla K80, 11441, 470.182.03\n"])
    assert result.cards == (NvidiaCard("Tesla K80", 11441 * 1024**2, "470.182.03", None),)
    assert "compute_cap" in commands[0][1]
    assert "compute_cap" not in commands[1][1]


def test_a_missing_driver_is_queried_once():
    result, commands = asked([None])
    assert result == NO_DRIVER
    assert len(commands) == 1


def test_a_driver_that_fails_twice_does_not_run():
    assert asked([FAILED, FAILED])[0].driver == "not running"


def test_truncated_output_gives_true_cards_or_none():
    for end in range(len(TWO)):
        assert parse_cards(TWO[:end]).cards in ((), (FIRST,))


@given(st.one_of(st.text(), st.lists(st.sampled_from([*TWO.split(","), "\n", "[N/A]"])).map(",".join)))
def test_any_text_never_crashes(text):
    assert parse_cards(text).driver != "missing"
