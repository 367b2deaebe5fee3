"""Optuna samplers and pruners by name, seeded by the search and the trial number."""

import hashlib
import importlib.util
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError, closest_match
from whet.config.sources import parse_args
from whet.hpo.space import MOST_VALUES, Choices, NumberRange, SearchSpace

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

_STEADY = ("GridSampler", "QMCSampler", "BruteForceSampler")
"""They walk one sequence: the same seed for every trial."""
_OWN_ARGUMENTS = ("PartialFixedSampler", "PatientPruner")
_PACKAGES = {"CmaEsSampler": "cmaes", "GPSampler": "scipy", "QMCSampler": "scipy", "WilcoxonPruner": "scipy"}
"""What Optuna imports in the midst of a search, and does not bring along."""


def make_sampler(said: str, space: SearchSpace, *, seed: int, number: int) -> "BaseSampler":
    """The sampler for the trial of that number. A process that goes on must not draw the first points again."""
    import optuna

    name, options = _read(said, "Sampler", optuna.samplers)
    made = getattr(optuna.samplers, name)
    accepted = inspect.signature(made).parameters
    if name == "GridSampler":
        options = {"search_space": _counted(space), **options}
    if name == "BruteForceSampler":
        _counted(space)
    if "seed" in options:
        # It would be the same for each trial, and so would the draw.
        raise UsageError("the seed of a search is a setting", got=said, try_=f"seed={options['seed']}")
    if name == "TPESampler":
        # Optuna's ten random trials would be most of a search of a dozen.
        options = {"n_startup_trials": 5, **options}
    if "seed" in accepted:
        options = {"seed": seed if name in _STEADY else _seed(seed, number), **options}
    sampler: BaseSampler = _made(made, options, said)
    return sampler


def make_pruner(said: str) -> "BasePruner":
    """The pruner; by default, a trial goes on while it is among the better quarter of those that were completed."""
    import optuna

    name, options = _read(said, "Pruner", optuna.pruners)
    if name == "PercentilePruner":
        # From the third of nine evaluations on, as soon as one trial is there to compare with (docs/choices/0013).
        options = {"percentile": 25.0, "n_startup_trials": 1, "n_warmup_steps": 2, **options}
    if name == "SuccessiveHalvingPruner":
        # After 2 and 6 of nine.
        options = {"min_resource": 2, "reduction_factor": 3, **options}
    pruner: BasePruner = _made(getattr(optuna.pruners, name), options, said)
    return pruner


def num_points(said: str, space: SearchSpace) -> int | None:
    """How many different trials the sampler can propose; None where that has no end."""
    import optuna

    name, _ = _read(said, "Sampler", optuna.samplers)
    return math.prod(map(len, _counted(space).values())) if name in ("GridSampler", "BruteForceSampler") else None


def space_distributions(space: SearchSpace) -> "dict[str, BaseDistribution]":
    """The space in Optuna's words."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(dimension: NumberRange | Choices) -> "BaseDistribution":
        if isinstance(dimension, Choices):
            return CategoricalDistribution(dimension.values)
        if dimension.is_whole:
            low, high = dimension.ends
            return IntDistribution(low, high, log=dimension.is_log, step=int(dimension.step or 1))
        return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log, step=dimension.step)

    return {key: of(dimension) for key, dimension in space.dimensions.items()}


def _seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def _read(said: str, kind: str, module: Any) -> tuple[str, dict[str, Any]]:
    """`TPESampler`, or with options of its own: `TPESampler:n_startup_trials=5`."""
    name, *options = said.split(":")
    known = [n for n in dir(module) if n.endswith(kind) and not n.startswith(("Base", "_")) and n not in _OWN_ARGUMENTS]
    # tpe, Median and HYPERBAND are understood as well.
    short = {n.lower().removesuffix(kind.lower()): n for n in known}
    full = name if name in known else short.get(name.lower().removesuffix(kind.lower()), "")
    if not full:
        meant = closest_match(name, known)
        hint = f"did you mean {meant}?" if meant else ", ".join(known)
        raise UsageError(f"Optuna has no such {kind.lower()}", got=name, try_=hint)
    package = _PACKAGES.get(full)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UsageError(f"{full} needs {package}", got="it is not installed", try_=f"pip install {package}")
    return full, parse_args(options).values


def _made(made: Any, options: Mapping[str, Any], said: str) -> Any:
    import optuna

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return made(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"Optuna refuses {said}", got=str(error)[:300], try_="its documentation") from None


def _counted(space: SearchSpace) -> dict[str, Any]:
    """All values of each key."""
    found = {}
    for key, dimension in space.dimensions.items():
        values = dimension.values
        if values is None:
            raise UsageError("a grid needs values that can be counted", got=f"{key}={dimension}", try_=f"{key}=[a,b,c]")
        found[key] = list(values)
    if math.prod(map(len, found.values())) > MOST_VALUES:
        raise UsageError("the grid has too many points", got=" ".join(space.words), try_="fewer values, or TPESampler")
    return found
