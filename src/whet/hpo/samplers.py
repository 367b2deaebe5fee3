"""Optuna samplers and pruners by name. Samplers are seeded by the seed of the search and the trial number."""

import hashlib
import importlib.util
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError, closest_match
from whet.config.sources import parse_args
from whet.hpo.space import MAX_VALUES, Choices, NumberRange, SearchSpace

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

# These samplers walk through one fixed sequence, so every trial needs the same seed.
_SEQUENTIAL = ("GridSampler", "QMCSampler", "BruteForceSampler")
# These wrap another sampler or pruner, which cannot be given on the command line.
_OWN_ARGUMENTS = ("PartialFixedSampler", "PatientPruner")
# Optional packages that Optuna would import only in the middle of a search. Check for them at the start.
_PACKAGES = {"CmaEsSampler": "cmaes", "GPSampler": "scipy", "QMCSampler": "scipy", "WilcoxonPruner": "scipy"}


def make_sampler(spec: str, space: SearchSpace, *, seed: int, number: int) -> "BaseSampler":
    """Return a sampler for one trial.

    The seed depends on the trial number. Otherwise all trials, which have separate samplers, would draw the same point.
    """
    import optuna

    name, options = _read(spec, "Sampler", optuna.samplers)
    kind = getattr(optuna.samplers, name)
    accepted = inspect.signature(kind).parameters
    if name == "GridSampler":
        options = {"search_space": _grid(space), **options}
    if name == "BruteForceSampler":
        _grid(space)
    if "seed" in options:
        # A fixed sampler seed would make every trial draw the same point.
        raise UsageError("set the seed of a search as an option", got=spec, try_=f"seed={options['seed']}")
    if name == "TPESampler":
        # Optuna's default of ten random trials would use up most of a small search.
        options = {"n_startup_trials": 5, **options}
    if "seed" in accepted:
        options = {"seed": seed if name in _SEQUENTIAL else _seed(seed, number), **options}
    sampler: BaseSampler = _create(kind, options, spec)
    return sampler


def make_pruner(spec: str) -> "BasePruner":
    """Return the pruner. The default prunes a trial that is not within the best quarter of the completed trials."""
    import optuna

    name, options = _read(spec, "Pruner", optuna.pruners)
    if name == "PercentilePruner":
        # Prune from the second of nine evaluations on, once one trial is complete (docs/choices/0013). Optuna does not
        # prune at steps below n_warmup_steps, and evaluations are counted from 1.
        options = {"percentile": 25.0, "n_startup_trials": 1, "n_warmup_steps": 2, **options}
    if name == "SuccessiveHalvingPruner":
        # With nine evaluations, the rungs are at evaluations 2 and 6.
        options = {"min_resource": 2, "reduction_factor": 3, **options}
    pruner: BasePruner = _create(getattr(optuna.pruners, name), options, spec)
    return pruner


def num_points(spec: str, space: SearchSpace) -> int | None:
    """Return the number of distinct trials that the sampler can propose, or None if there is no limit."""
    import optuna

    name, _ = _read(spec, "Sampler", optuna.samplers)
    return math.prod(map(len, _grid(space).values())) if name in ("GridSampler", "BruteForceSampler") else None


def space_distributions(space: SearchSpace) -> "dict[str, BaseDistribution]":
    """Return the Optuna distribution of each key."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(dimension: NumberRange | Choices) -> "BaseDistribution":
        if isinstance(dimension, Choices):
            return CategoricalDistribution(dimension.values)
        if dimension.is_integer:
            low, high = dimension.ends
            return IntDistribution(low, high, log=dimension.is_log, step=int(dimension.step or 1))
        return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log, step=dimension.step)

    return {key: of(dimension) for key, dimension in space.dimensions.items()}


def _seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def _read(spec: str, kind: str, module: Any) -> tuple[str, dict[str, Any]]:
    """Parse a name with optional options, such as `TPESampler:n_startup_trials=5`."""
    name, *options = spec.split(":")
    known = [n for n in dir(module) if n.endswith(kind) and not n.startswith(("Base", "_")) and n not in _OWN_ARGUMENTS]
    # Accept short and case-insensitive names too: tpe, Median, HYPERBAND.
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


def _create(kind: Any, options: Mapping[str, Any], spec: str) -> Any:
    import optuna

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return kind(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"Optuna rejects {spec}", got=str(error)[:300], try_="see Optuna's documentation") from None


def _grid(space: SearchSpace) -> dict[str, Any]:
    """Return all values of each key. Raise UsageError for a continuous range or too many points."""
    grid = {}
    for key, dimension in space.dimensions.items():
        values = dimension.values
        if values is None:
            raise UsageError("a grid needs a finite number of values", got=f"{key}={dimension}", try_=f"{key}=[a,b,c]")
        grid[key] = list(values)
    if math.prod(map(len, grid.values())) > MAX_VALUES:
        raise UsageError(
            "the grid has too many points", got=" ".join(space.arguments), try_="fewer values, or TPESampler"
        )
    return grid
