"""The table of Apple chips, with the sources of its figures."""

from typing import NamedTuple

FAMILY_SOURCE = "ATen/mps/MPSDevice.h of torch 2.13"


class ChipGeneration(NamedTuple):
    """Facts that the chips of one generation share."""

    gpu_family: str | None
    """Apple's GPU family, from FAMILY_SOURCE."""
    specs_source: str
    """Source of cores, bandwidth and memory."""


class Chip(NamedTuple):
    name: str
    generation: ChipGeneration
    cpu: tuple[tuple[int, int], ...]
    """Numbers of (fast, slow) cores, one pair per variant."""
    gpu_cores: tuple[int, ...]
    bandwidth: tuple[int, ...]
    """Bandwidth of the shared memory, in GB/s."""
    max_memory_gb: int
    fp32_tflops: tuple[float, float]
    """Range of the peak of the variant with the most GPU cores: GPU cores x 128 ALUs x 2 operations x clock.

    Apple publishes no clock, so the range is from the lowest to the highest clock in the sources.
    """

    @property
    def gpu_family(self) -> str | None:
        return self.generation.gpu_family


_SPECS = "Apple's technical specifications of the Macs with this chip (support.apple.com)"
_M5_SPECS = "Apple's announcement of 2026-03-03 as reported by macrumors.com and gadgets360.com"
# Sources of the clocks: philipturner/applegpuinfo#2, #4, #6, #10, #11 and huggingface/huggingface.js#1044.
# M1 1.278 GHz (M1 Pro, Max and Ultra 1.296), M2 1.398, M3 1.38 to 1.6, M4 1.66 to 1.8. Estimated: M5 1.6 to 1.95,
# A18 1.5.
M1 = ChipGeneration("apple7", _SPECS)
M2 = ChipGeneration("apple8", _SPECS)
M3 = ChipGeneration("apple9", _SPECS)
M4 = ChipGeneration("apple9", _SPECS)
M5 = ChipGeneration("apple10", _M5_SPECS)
A18 = ChipGeneration(None, _M5_SPECS)

CHIPS: tuple[Chip, ...] = (
    Chip("Apple M1", M1, ((4, 4),), (7, 8), (68,), 16, (2.6, 2.6)),
    Chip("Apple M1 Pro", M1, ((6, 2), (8, 2)), (14, 16), (200,), 32, (5.2, 5.3)),
    Chip("Apple M1 Max", M1, ((8, 2),), (24, 32), (400,), 64, (10.4, 10.6)),
    Chip("Apple M1 Ultra", M1, ((16, 4),), (48, 64), (800,), 128, (21.0, 21.2)),
    Chip("Apple M2", M2, ((4, 4),), (8, 10), (100,), 24, (3.6, 3.6)),
    Chip("Apple M2 Pro", M2, ((6, 4), (8, 4)), (16, 19), (200,), 32, (6.8, 6.8)),
    Chip("Apple M2 Max", M2, ((8, 4),), (30, 38), (400,), 96, (13.6, 13.6)),
    Chip("Apple M2 Ultra", M2, ((16, 8),), (60, 76), (800,), 192, (27.0, 27.2)),
    Chip("Apple M3", M3, ((4, 4),), (8, 10), (100,), 24, (3.5, 4.1)),
    Chip("Apple M3 Pro", M3, ((5, 6), (6, 6)), (14, 18), (150,), 36, (6.4, 7.4)),
    Chip("Apple M3 Max", M3, ((10, 4), (12, 4)), (30, 40), (300, 400), 128, (14.0, 16.0)),
    Chip("Apple M3 Ultra", M3, ((20, 8), (24, 8)), (60, 80), (819,), 512, (28.0, 33.0)),
    Chip("Apple M4", M4, ((4, 4), (4, 6)), (8, 10), (120,), 32, (4.3, 4.6)),
    Chip("Apple M4 Pro", M4, ((8, 4), (10, 4)), (16, 20), (273,), 64, (8.5, 9.2)),
    Chip("Apple M4 Max", M4, ((10, 4), (12, 4)), (32, 40), (410, 546), 128, (17.0, 18.4)),
    Chip("Apple M5", M5, ((4, 6),), (8, 10), (153,), 32, (4.2, 5.0)),
    # Fast cores are "super", slow ones "performance" (pytorch/cpuinfo#424); there are no efficiency cores.
    Chip("Apple M5 Pro", M5, ((5, 10), (6, 12)), (16, 20), (307,), 64, (8.0, 9.0)),
    # The bandwidth with the 32-core GPU, 460 GB/s, is less certain than the other figures.
    Chip("Apple M5 Max", M5, ((6, 12),), (32, 40), (460, 614), 128, (17.0, 18.0)),
    # The chip of the MacBook Neo.
    Chip("Apple A18 Pro", A18, ((2, 4),), (5,), (60,), 8, (1.9, 1.9)),
)

_BY_NAME = {chip.name.casefold(): chip for chip in CHIPS}


def find_chip(name: str | None) -> Chip | None:
    """Return the chip with this name, or None if it is not in the table.

    >>> find_chip("Apple M2 Max").bandwidth
    (400,)
    >>> find_chip("m5 pro").name, find_chip("Apple M9")
    ('Apple M5 Pro', None)
    """
    # "Apple M2", "apple m2" and "M2" are the same chip.
    words = (name or "").casefold().split()
    if words[:1] == ["apple"]:
        words = words[1:]
    return _BY_NAME.get(" ".join(["apple", *words]))
