"""Redaction removes what names a person or a computer, and leaves other text alone."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from whet.doctor import redaction
from whet.doctor.redaction import redact, redact_identifiers


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("open /Users/anna/x.py: no", "open .../x.py: no"),
        ("'/Volumes/My disk/a b/c d'", "'.../c d'"),
        ('"/Volumes/My disk/thesis/x.pt"', '".../x.pt"'),
        ("~/models/best.pt", ".../best.pt"),
        ("open /Volumes/My big disk/a/x.pt: no", "open .../x.pt: no"),
        ("no /home/berta or /Users/berta", "no ~ or ~"),
        ("3/4 of 1/2", "3/4 of 1/2"),
        ("a/b, and/or, n/a", "a/b, and/or, n/a"),
        ("serial C02XL0GYJGH5, F2LXW03QKQ", "serial (serial), (serial)"),
        ('"serial_number": "ABCD12"', '"serial_number": "(serial)"'),
        ("serial port, serialized 3 times", "serial port, serialized 3 times"),
        ("disk 8932F937-D72C-4106-C12F-20BD9FAED9F6", "disk (id)"),
        ("en0 f4:d4:88:01:02:ff, anna.berg@uni.example", "en0 (address), (address)"),
        ("BFLOAT16 CUDNN_STATUS_2 0x16F00ABCDEF0 2.13.0+cpu", "BFLOAT16 CUDNN_STATUS_2 0x16F00ABCDEF0 2.13.0+cpu"),
        ("https://github.com/pytorch/pytorch/issues/141287", "https://github.com/pytorch/pytorch/issues/141287"),
    ],
)
def test_redact_shortens_paths_and_removes_identifiers(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact_identifiers(shown) == shown


def test_redact_removes_a_home_with_a_space_and_names(monkeypatch) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/Users/Anna Berg"))
    monkeypatch.setattr("platform.node", lambda: "annas-air.local")
    monkeypatch.setattr("getpass.getuser", lambda: "aberg")
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_gecos="Anna Berg,,,"))
    redaction._name_patterns.cache_clear()
    try:
        shown = redact("no /Users/Anna Berg/thesis/x.py on annas-air for aberg (annas-air.local), Anna Berg")
    finally:
        redaction._name_patterns.cache_clear()
    assert shown == "no .../x.py on (host) for (user) ((host)), (user)"
