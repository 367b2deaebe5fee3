"""The result of `whet prove`, stored in the run folder."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.run import durable, strict_json
from whet.run.strict_json import StrictModel

FORMAT_VERSION = 1
PROOF_FILE = "proof.json"

# If fewer processes resumed, all kills may have hit the start of the run, which proves nothing about resuming.
MIN_RESUMED_FRACTION = 0.6

Verdict = Literal["proved", "broken", "cannot be proved"]


class KillCounts(StrictModel):
    """Counts of the kills of one kind (random or at disk calls), and of their effects."""

    kills: int = 0
    processes: int = 0
    """Number of processes, including those that were not killed."""
    resumed: int = 0
    """Number of processes that resumed from a checkpoint after step 0."""
    inside_save: int = 0
    """Number of kills that interrupted writing or removing a checkpoint, judging by the files on disk."""
    leftovers: int = 0
    """Number of incomplete files and folders found after kills."""
    torn: int = 0
    """Number of incomplete checkpoints found under their final name."""

    def plus(self, other: "KillCounts") -> "KillCounts":
        return KillCounts(**{name: getattr(self, name) + getattr(other, name) for name in KillCounts.model_fields})


class ComparedCounts(StrictModel):
    """Numbers of tensors, losses, metrics and runs that were compared with the uninterrupted run."""

    tensors: int = 0
    bytes: int = 0
    losses: int = 0
    metrics: int = 0
    runs: int = 0
    """Number of interrupted runs that were compared."""
    left_out: tuple[str, ...] = ()
    """Metrics that were not compared, because they differ even between two uninterrupted runs, such as seconds."""


class ProofDifference(StrictModel):
    """A difference between an interrupted run and the uninterrupted one."""

    what: str
    """Description of the difference."""
    tensor: str | None = None
    """Name of the first tensor that differs; None if no tensor does."""
    largest: float | None = None
    """Largest difference between the elements of the tensor."""
    step: int | None = None
    """First step whose loss differs; None if no loss does."""
    kills: str | None = None
    """The kills before the difference, such as "disk call 17" or "random kill 3 to 9"."""
    not_restored: tuple[str, ...] = ()
    """Variables of the user's program whose values differed between a resumed process and the uninterrupted one."""


class Proof(StrictModel):
    """The result of `whet prove`: a verdict and its evidence."""

    format_version: int = FORMAT_VERSION
    verdict: Verdict
    reason: str | None = None
    """The reason why nothing was proved; None if something was."""
    difference: ProofDifference | None = None
    recipe: str
    device: str = "unknown"
    steps: int = 0
    """Number of optimizer steps in the tested run."""
    shortened: tuple[str, ...] = ()
    """Differences between the tested run and the full one."""
    launch: str = ""
    """How the processes were started."""
    at_random: KillCounts = Field(default_factory=KillCounts)
    at_disk_calls: KillCounts = Field(default_factory=KillCounts)
    disk_calls: int = 0
    """Number of calls that change the disk in one resume, the next save and its cleanup."""
    compared: ComparedCounts = Field(default_factory=ComparedCounts)
    seed: int
    repeat: str
    """Command that repeats the same kills."""
    whet: str
    versions: dict[str, str | None] = Field(default_factory=dict)
    created: float
    seconds: float = 0.0

    @property
    def total(self) -> KillCounts:
        """The sum of kills at random times and at disk calls."""
        return self.at_random.plus(self.at_disk_calls)


def why_insufficient(
    at_random: KillCounts, at_disk_calls: KillCounts, compared: ComparedCounts, *, num_kills: int, steps: int
) -> str | None:
    """Return the reason why equal results are not sufficient evidence; None if they are."""
    total = at_random.plus(at_disk_calls)
    if at_random.kills < num_kills:
        return f"{at_random.kills} of {num_kills} kills at random instants happened"
    if at_disk_calls.kills == 0:
        return "no kill at a disk call happened"
    if at_random.resumed < MIN_RESUMED_FRACTION * at_random.processes:
        return f"only {at_random.resumed} of {at_random.processes} processes resumed from a checkpoint"
    if total.inside_save == 0:
        return "no kill fell inside a save"
    if compared.runs == 0 or compared.tensors == 0 or compared.losses < steps:
        return f"{compared.tensors} tensors and {compared.losses} of {steps} losses of {compared.runs} runs compared"
    return None


def write_proof(folder: Path, proof: Proof) -> Path:
    """Write the proof to a run folder atomically and return its path."""
    path = folder / PROOF_FILE
    durable.write_file(path, data=(strict_json.encode(proof.as_json(), pretty=True) + "\n").encode())
    return path


def read_proof(folder: Path) -> Proof | None:
    """Read the proof in a run folder; None if there is none."""
    path = folder / PROOF_FILE
    if not path.exists():
        return None
    try:
        fields = strict_json.decode(path.read_bytes())
        if fields.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format {fields.get('format_version')}; this is {FORMAT_VERSION}")
        return Proof.from_json(fields, where=path)
    except (OSError, ValueError, UsageError) as error:
        raise WhetError("cannot read the proof", got=f"{path}: {error}"[:300], try_="whet prove again") from None


def proof_line(proof: Proof) -> str:
    """Return the proof as one line for reports."""
    total = proof.total
    resumed = f"{total.resumed} of {total.processes} processes resumed"
    counts = f"{total.kills} kills, {total.inside_save} inside a save, {resumed}"
    if proof.verdict == "proved":
        return f"proved: {counts}, all bits equal"
    why = proof.difference.what if proof.difference else proof.reason
    return f"{proof.verdict}: {why}" + (f" ({counts})" if total.kills else "")
