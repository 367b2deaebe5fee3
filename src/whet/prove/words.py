"""A proof as lines for a screen."""

from whet.base.units import show_bytes, show_seconds
from whet.run.proof import Proof, Tally


def proof_lines(proof: Proof) -> list[str]:
    """The verdict first, then what it rests on."""
    lines = [_line(proof.verdict, f"{proof.recipe}: {_short_reason(proof)}")]
    if proof.difference is not None:
        where = f"; after {proof.difference.kills}" if proof.difference.kills else ""
        lines.append(_line("differs", proof.difference.what + where))
    piece = f"{proof.steps} steps on {proof.device}"
    lines.append(_line("piece", piece + "".join(f"; {change}" for change in proof.shortened)))
    lines.append(_line("at random", _tally(proof.at_random)))
    lines.append(
        _line(
            "disk calls",
            f"{proof.disk_calls} calls of a resume, a save and its tidying; " + _tally(proof.at_disk_calls),
        )
    )
    compared = proof.compared
    left_out = f"; left out: {', '.join(compared.left_out)}" if compared.left_out else ""
    lines.append(
        _line(
            "compared",
            f"{compared.runs} interrupted runs with one that was not: {compared.tensors} tensors "
            f"({show_bytes(compared.bytes)}), {compared.losses} losses, {compared.metrics} metrics and all facts"
            f"{left_out}",
        )
    )
    lines.append(_line("lives", proof.births))
    lines.append(_line("repeat", f"{proof.repeat} ({show_seconds(proof.seconds)})"))
    return lines


def _short_reason(proof: Proof) -> str:
    if proof.verdict == "proved":
        return "killed, resumed, and every bit is equal"
    return proof.reason or ""


def _tally(tally: Tally) -> str:
    return (
        f"{tally.kills} kills, {tally.inside_save} inside a save; {tally.lives} lives, {tally.resumed} resumed; "
        f"{tally.leftovers} left-overs, {tally.torn} torn"
    )


def _line(label: str, text: str) -> str:
    return f"{label:<18}{text}"
