"""Damaged journals of a search."""

from pathlib import Path

import pytest

from whet.base.errors import WhetError
from whet.hpo.storage import JOURNAL_FILE, open_storage


def test_journal_with_nul_bytes_is_damaged(tmp_path: Path) -> None:
    """A file system may leave NULs after a power cut. Optuna would skip them, and every trial after them."""
    with open_storage(None, folder=tmp_path) as storage:
        for number in range(20):
            storage.create_new_study([], study_name=f"study {number}")
    journal = tmp_path / JOURNAL_FILE
    content = journal.read_bytes()
    with open_storage(None, folder=tmp_path) as storage:
        assert len(storage.get_all_studies()) == 20
    half = len(content) // 2
    for damaged in (content[:half] + bytes(len(content) - half), content + bytes(4096)):
        journal.write_bytes(damaged)
        with (
            pytest.raises(WhetError, match="the journal of the trials is damaged") as caught,
            open_storage(None, folder=tmp_path),
        ):
            pass
        assert "NUL bytes from byte" in (caught.value.got or "")
