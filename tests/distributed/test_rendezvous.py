"""The rendezvous of ranks: a port in use, an unreachable rank 0. Real sockets."""

import socket
from collections.abc import Iterator

import pytest

from whet.base.errors import UsageError, WhetError
from whet.distributed.ranks import RankInfo
from whet.distributed.store import join_store

pytestmark = pytest.mark.torch


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A port in use that does not answer."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        yield other


def test_a_port_that_is_taken_is_named(taken: socket.socket) -> None:
    taken.listen()
    with pytest.raises(UsageError, match="rendezvous port is taken") as refused:
        join_store(RankInfo(rank=0, size=2), start_seconds=2, timeout_seconds=20)
    assert str(taken.getsockname()[1]) in str(refused.value)


@pytest.mark.usefixtures("taken")
def test_a_first_process_that_is_not_there_is_not_waited_for_as_long_as_an_evaluation() -> None:
    with pytest.raises(WhetError, match="cannot reach each other") as refused:
        join_store(RankInfo(rank=1, size=2), start_seconds=1, timeout_seconds=20)
    assert "rank 1 of 2 at 127.0.0.1" in str(refused.value)
