"""What is told of prepared conversations, in lines for a person?"""

from pathlib import Path

from whet.base.units import format_bytes, format_percent, format_plural
from whet.recipes.chat.manifest import PARTS, Manifest

_SHOWN_BAD = 5


def lines(manifest: Manifest, folder: Path) -> tuple[str, ...]:
    """What was read, what became of it, and what to do next."""
    told = manifest.told
    read = ", ".join(f"{source['name']} ({source['shape']})" for source in manifest.made_from)
    rows = [("read", f"{format_plural(told['conversations_found'], 'conversation')}: {read}")]
    for number, (where, why) in enumerate(told["bad_records_shown"][:_SHOWN_BAD]):
        rows.append(("" if number else "skipped", f"{where}: {why}"))
    if told["bad_records"] > _SHOWN_BAD:
        rows.append(("", f"... {told['bad_records']:,} bad records in all"))
    for key, words in _LEFT_OUT.items():
        if told[key]:
            rows.append(("note", f"{told[key]:,} {words}"))
    if not manifest.parts["val"].conversations:
        rows.append(
            ("note", "nothing is held out for dev, which a training needs: more conversations, or --train-split")
        )
    for part in PARTS:
        facts = manifest.parts[part]
        fill = facts.tokens / (facts.rows * manifest.max_length) if facts.rows else 0
        rows.append(
            (
                part,
                f"{format_plural(facts.conversations, 'conversation')}, {format_plural(facts.tokens, 'token')}, "
                f"{facts.loss_tokens:,} of them learned; {format_plural(facts.rows, 'row')} of {manifest.max_length:,}, "
                f"{format_percent(fill, 1)} full",
            )
        )
    rows.append(("tokens", f"{manifest.tokenizer}, {manifest.vocab_size:,} ids; loss on {_LOSS[manifest.loss]}"))
    size = sum(file.bytes for file in manifest.files.values())
    rows.append(("wrote", f"{folder} ({format_bytes(size)}); whet train chat data_paths=[{folder}]"))
    return tuple(f"{name:9} {words}" for name, words in rows)


_LOSS = {"assistant": "the assistant's text and the end of its turns", "all": "every token"}
_LEFT_OUT = {
    "conversations_left_out_by_subsample": "conversations left out (--subsample-size)",
    "conversations_left_out_as_held_out_elsewhere": "conversations left out: a held-out file has them too",
    "conversations_cut_apart": "conversations longer than --max-length became pieces that end with an answer",
    "documents_shortened": "pieces had a question or an answer longer than --max-length, whose end was cut off",
    "texts_that_the_tokenizer_changes": "texts of a sample do not come back from this tokenizer as they were: answers "
    "are learned as it spells them, and bits per byte compare with nothing else",
}
