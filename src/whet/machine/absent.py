"""Why can torch not use MPS or CUDA here, and what would help? A pure function of facts."""

from collections.abc import Callable
from dataclasses import dataclass

from whet.machine.apple_parsers import major_version
from whet.machine.cuda import NO_DRIVER, Cards
from whet.machine.facts import Absent, DeviceKind, OperatingSystem
from whet.machine.torch_child import TorchAnswer

OLDEST_MACOS = 14
"""torch asks for macOS 14.0 since 2.9 (pytorch/pytorch#159912)."""

_INSTALL = "pip install 'torch>=2.11,<2.14'; https://pytorch.org names the command for other builds"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that the answer depends on."""

    os: OperatingSystem
    """Its architecture is this Python's."""
    torch: TorchAnswer
    has_apple_silicon: bool | None = None
    cards: Cards = NO_DRIVER
    has_card_on_bus: bool | None = None
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES as it is; None when unset."""


@dataclass(frozen=True)
class Why:
    """One reason: the first of a list that applies is the answer."""

    applies: Callable[[Situation], bool]
    reason: str
    cure: str


def why_absent(situation: Situation) -> tuple[Absent, ...]:
    """The devices that torch cannot use here, each with the reason and the cure."""
    found = []
    if not situation.torch.mps_available:
        found.append(_explain("mps", _NO_MPS, situation))
    if not situation.torch.cuda_available:
        found.append(_explain("cuda", _NO_CUDA, situation))
    return tuple(found)


def hides_all(visible_devices: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every card: empty, or a first entry that CUDA does not accept, like -1."""
    if visible_devices is None:
        return False
    first = visible_devices.split(",")[0].strip()
    return not first or first.startswith("-") or first == "NoDevFiles"


def _explain(device: DeviceKind, reasons: tuple[Why, ...], situation: Situation) -> Absent:
    why = next(why for why in reasons if why.applies(situation))
    words = {
        "version": situation.torch.version or "",
        "error": situation.torch.error or "",
        "macos": situation.os.version or "",
        "cards": ", ".join(sorted({card.name for card in situation.cards.cards if card.name})) or "an NVIDIA GPU",
        "driver": next((card.driver for card in situation.cards.cards if card.driver), "here"),
        "said": situation.torch.cuda_error or "torch gives no reason",
        "build": situation.torch.cuda_build or "",
    }
    return Absent(device=device, reason=why.reason.format(**words), cure=why.cure.format(**words))


def _is_old_macos(situation: Situation) -> bool:
    major = major_version(situation.os.version)
    return major is not None and major < OLDEST_MACOS


_NO_MPS = (
    Why(
        lambda s: s.os.name != "macOS",
        "MPS is Apple's; this machine does not run macOS",
        "train on another device here; to plan for a Mac use --machine, for instance --machine m2-air-8gb",
    ),
    Why(
        lambda s: s.has_apple_silicon is False,
        "this Mac has an Intel processor; torch's MPS needs Apple silicon",
        "train on the CPU here, or use a Mac with an M-series chip",
    ),
    Why(
        lambda s: s.os.architecture == "x86_64" and s.has_apple_silicon is True,
        "this Python is built for Intel and runs under Rosetta, where there is no MPS",
        "install a Python for arm64 (python.org, Homebrew in /opt/homebrew, or uv) and make a new environment",
    ),
    Why(
        _is_old_macos,
        f"macOS {{macos}} is too old; torch's MPS needs macOS {OLDEST_MACOS}",
        f"update to macOS {OLDEST_MACOS} or newer",
    ),
    Why(lambda s: s.torch.error == "torch is not installed", "torch is not installed", _INSTALL),
    Why(
        lambda s: s.torch.error is not None,
        "{error}",
        "make `python -c 'import torch'` work first; a new environment with a fresh install often does",
    ),
    Why(
        lambda s: s.torch.mps_built is False,
        "torch {version} was built without MPS",
        "install PyPI's build, which has MPS: pip install --force-reinstall torch",
    ),
    Why(
        lambda _: True,
        "torch {version} has MPS but finds no Metal device",
        "leave a virtual machine or a remote login without a graphics session, or restart the Mac",
    ),
)

_NO_CUDA = (
    Why(
        lambda s: s.os.name == "macOS",
        "there is no CUDA on macOS",
        "train on MPS here; the same run continues on a CUDA machine",
    ),
    Why(
        lambda s: s.cards.driver == "missing" and s.has_card_on_bus is True,
        "an NVIDIA GPU is in this machine, but its driver is not installed (no nvidia-smi)",
        "install NVIDIA's driver and restart",
    ),
    Why(
        lambda s: s.cards.driver == "missing" and s.has_card_on_bus is False,
        "this machine has no NVIDIA GPU",
        "train on the CPU here, or use a machine with an NVIDIA GPU",
    ),
    Why(
        lambda s: s.cards.driver == "missing",
        "no NVIDIA driver was found (nvidia-smi is missing or does not answer)",
        "install NVIDIA's driver; in a container pass the GPU through, for instance docker run --gpus all",
    ),
    Why(
        lambda s: s.cards.driver == "not running",
        "NVIDIA's driver is installed but does not run",
        "see what nvidia-smi says; a restart after a kernel or driver update often helps",
    ),
    Why(
        lambda s: s.cards.driver == "no card",
        "NVIDIA's driver runs but finds no GPU",
        "check that the GPU is seated, powered and passed through to this machine or container",
    ),
    Why(
        lambda s: s.torch.error == "torch is not installed",
        "{cards} is here, but torch is not installed",
        _INSTALL,
    ),
    Why(
        lambda s: s.torch.error is not None,
        "{cards} is here, but {error}",
        "make `python -c 'import torch'` work first; a new environment with a fresh install often does",
    ),
    Why(
        lambda s: s.torch.cuda_build is None,
        "{cards} is here, but torch {version} was built without CUDA",
        "install a CUDA build of torch: https://pytorch.org names the command for your driver",
    ),
    Why(
        lambda s: hides_all(s.visible_devices),
        "{cards} is here, but CUDA_VISIBLE_DEVICES hides every GPU",
        "unset CUDA_VISIBLE_DEVICES, or name a GPU in it, for instance CUDA_VISIBLE_DEVICES=0",
    ),
    Why(
        lambda s: "too old" in (s.torch.cuda_error or ""),
        "driver {driver} is too old for torch {version} (built for CUDA {build})",
        "update NVIDIA's driver, or install a torch built for an older CUDA",
    ),
    Why(
        lambda _: True,
        "torch {version} cannot start CUDA: {said}",
        "see what nvidia-smi says; a restart after a driver update often helps",
    ),
)
