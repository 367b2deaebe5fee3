"""The result of `whet prove`, which it writes into the run folder."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.run import durable, strict_json
from whet.run.strict_json import StrictModel

FORMAT_VERSION = 1
PROOF_FILE = "proof.json"

# If fewer processes than this resumed from a checkpoint, all kills may have hit the start: no evidence.
MIN_RESUMED_FRACTION = 0.6

Verdict = Literal["proved", "broken", "cannot be proved"]


class KillCounts(StrictModel):
    """What the kills of one kind hit."""

    kills: int = 0
    processes: int = 0
    """All processes, including those that were left to finish."""
    resumed: int = 0
    """Processes that resumed from a checkpoint after step 0."""
    inside_save: int = 0
    """Kills that interrupted writing or removing a checkpoint, judged by what was on the disk."""
    leftovers: int = 0
    """Incomplete files and folders found after kills."""
    torn: int = 0
    """Checkpoints that had their final name and were incomplete."""

    def plus(self, other: "KillCounts") -> "KillCounts":
        """The sum of both."""
        return KillCounts(**{name: getattr(self, name) + getattr(other, name) for name in KillCounts.model_fields})


class ComparedCounts(StrictModel):
    """How much of each run was compared with the uninterrupted one."""

    tensors: int = 0
    bytes: int = 0
    losses: int = 0
    metrics: int = 0
    runs: int = 0
    """Interrupted runs that were compared."""
    left_out: tuple[str, ...] = ()
    """Metrics that differ even between two uninterrupted runs, such as seconds."""


class ProofDifference(StrictModel):
    """What differed."""

    what: str
    """As text."""
    tensor: str | None = None
    """The first tensor that differs, by name."""
    largest: float | None = None
    """The largest difference in it."""
    step: int | None = None
    """The first step whose loss differs."""
    kills: str | None = None
    """The kills before it: "disk call 17", "random kill 3 to 9"."""


class Proof(StrictModel):
    """A verdict, and the evidence for it."""

    format_version: int = FORMAT_VERSION
    verdict: Verdict
    reason: str | None = None
    """Why it is not proved."""
    difference: ProofDifference | None = None
    recipe: str
    device: str = "unknown"
    steps: int = 0
    """Optimizer steps of the tested training."""
    shortened: tuple[str, ...] = ()
    """How the tested training differs from the full one."""
    launch: str = ""
    """How the processes were started."""
    at_random: KillCounts = Field(default_factory=KillCounts)
    at_disk_calls: KillCounts = Field(default_factory=KillCounts)
    disk_calls: int = 0
    """Calls that change the disk, of one resume, the next save and its cleanup."""
    compared: ComparedCounts = Field(default_factory=ComparedCounts)
    seed: int
    repeat: str
    """The command that repeats the same kills."""
    whet: str
    versions: dict[str, str | None] = Field(default_factory=dict)
    created: float
    seconds: float = 0.0

    @property
    def total(self) -> KillCounts:
        """All kills together."""
        return self.at_random.plus(self.at_disk_calls)


def why_insufficient(
    at_random: KillCounts, at_disk_calls: KillCounts, compared: ComparedCounts, *, num_kills: int, steps: int
) -> str | None:
    """Why equal results are not enough evidence; None when they are."""
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
    """Write the proof into a run folder, atomically; returns its path."""
    path = folder / PROOF_FILE
    durable.write_file(path, data=(strict_json.encode(proof.as_json(), pretty=True) + "\n").encode())
    return path


def read_proof(folder: Path) -> Proof | None:
    """Read the proof in a run folder; None without one."""
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
    """The proof in one line, for reports."""
    total = proof.total
    resumed = f"{total.resumed} of {total.processes} processes resumed"
    counts = f"{total.kills} kills, {total.inside_save} inside a save, {resumed}"
    if proof.verdict == "proved":
        return f"proved: {counts}, all bits equal"
    why = proof.difference.what if proof.difference else proof.reason
    return f"{proof.verdict}: {why}" + (f" ({counts})" if total.kills else "")
