"""On which address and port does a server listen? Loopback, unless somebody insists; the next port if one is taken."""

import contextlib
import errno
import ipaddress
import socket
from dataclasses import dataclass

import psutil

from whet.base.errors import UsageError, WhetError

LOOPBACK = "127.0.0.1"
_TRIES = 50
_QUEUE = 128
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens, and by which names it may be called."""

    address: str
    port: int
    sockets: tuple[socket.socket, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def host(self) -> str:
        """The name and port for links."""
        address = _own_addresses()[0] if ipaddress.ip_address(self.address).is_unspecified else self.address
        return f"{_in_url(address)}:{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        """All names and ports that are ours."""
        names = {"localhost", "127.0.0.1", "[::1]"}
        if not self.is_loopback:
            names.add(_in_url(self.address))
            names.update(_in_url(address) for address in _own_addresses())
            names.add(socket.gethostname().lower())
        named = {f"{name}:{self.port}" for name in names}
        return frozenset(named | names if self.port == 80 else named)

    def queue(self) -> None:
        """Lets clients wait for us in the system, where they cost nothing; asyncio had set it to how many it takes."""
        for one in self.sockets:
            one.listen(_QUEUE)

    def close(self) -> None:
        """Lets go of the port."""
        for one in self.sockets:
            one.close()


def listen(port: int, *, address: str = LOOPBACK) -> Place:
    """Takes the port, or the next free one (0: any). On loopback both IPv4 and IPv6, as `localhost` may mean either."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError("not an address", got=address, try_=f"{LOOPBACK}, or an IP address of this machine") from None
    if not 0 <= port <= 65535:
        raise UsageError("not a port", got=port, try_="a number from 1024 to 65535, or 0 for any")
    addresses = ["127.0.0.1", "::1"] if wanted.is_loopback else [str(wanted)]
    refused: OSError | None = None
    for offset in range(_TRIES):
        tried = port + offset if port else 0
        if tried > 65535:
            break
        try:
            return _take(tried, addresses, address=str(wanted))
        except OSError as error:
            refused = error
            if error.errno not in _TAKEN:
                break
    raise WhetError(f"cannot listen on {address}", got=f"port {port}: {refused}", try_="--port 0, which takes any")


def _take(port: int, addresses: list[str], *, address: str) -> Place:
    taken: list[socket.socket] = []
    try:
        for one in addresses:
            try:
                taken.append(_socket(one, port))
            except OSError as error:
                if one == "::1" and error.errno not in _TAKEN:
                    continue  # A machine without IPv6.
                raise
            port = taken[0].getsockname()[1]
    except BaseException:
        for one_taken in taken:
            one_taken.close()
        raise
    return Place(address=address, port=port, sockets=tuple(taken))


def _socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        # Only now the port is taken for everybody: two of us may have bound it.
        made.listen(_QUEUE)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _own_addresses() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for addresses in psutil.net_if_addrs().values():
            found += [one.address for one in addresses if one.family == socket.AF_INET]
    others = [one for one in found if not ipaddress.ip_address(one).is_loopback]
    return others or [LOOPBACK]


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
