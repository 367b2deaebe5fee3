"""Running another program never raises, and unusable output is None."""

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.machine.programs import clean_name, complete_lines, positive_number, run_program, whole_number


def python(code):
    return [sys.executable, "-S", "-c", code]


def test_the_output_of_a_program_is_returned():
    assert run_program(python("print('8 GB')")) == "8 GB\n"


def test_programs_run_in_the_c_locale(monkeypatch):
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert run_program(python("import os; print(os.environ['LC_ALL'], os.environ['LANG'])")) == "C C\n"


@pytest.mark.parametrize(
    "command",
    [
        ["whet-no-such-program"],
        ["/"],
        ["a\0b"],
        python("raise SystemExit(3)"),
        python("import os; os.kill(os.getpid(), 9)"),
        python("import sys; sys.stdout.buffer.write(bytes([255, 254]))"),
    ],
)
def test_a_program_that_fails_is_none(command):
    assert run_program(command) is None


def test_any_exit_keeps_the_output_of_a_failing_program():
    command = python("print('No devices were found'); raise SystemExit(6)")
    assert run_program(command) is None
    assert run_program(command, any_exit=True) == "No devices were found\n"


def test_a_program_that_hangs_is_none_soon():
    start = time.monotonic()
    assert run_program(python("import time; time.sleep(60)"), timeout_seconds=0.2) is None
    assert time.monotonic() - start < 10


def test_a_program_gets_no_input_and_its_stderr_is_hidden(capfd):
    assert run_program(python("import sys; sys.stderr.write('warning'); print(sys.stdin.read() == '')")) == "True\n"
    assert capfd.readouterr() == ("", "")


@given(st.text())
def test_incomplete_lines_are_dropped(text):
    lines = complete_lines(text)
    assert len(lines) == text.count("\n")
    assert all("\n" not in line for line in lines)
    assert complete_lines(None) == []


@pytest.mark.parametrize("text", ["", "8.0", "-8", "+8", "0x8", "8 GB", "٨", "8" * 19, None, 8, "8\n8"])
def test_only_plain_digits_are_numbers(text):
    assert whole_number(text) is None


def test_positive_number_rejects_zero():
    assert whole_number("0") == 0
    assert positive_number("0") is None
    assert positive_number("8") == 8


@given(st.text())
def test_names_fit_on_one_line(text):
    name = clean_name(text)
    assert name is None or (name.isprintable() and 0 < len(name) <= 120 and name == name.strip())
