"""How do answers become lines of CSV or JSON? No torch."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whet.base.errors import WhetError
from whet.run.plain_file import open_plain

if TYPE_CHECKING:
    from whet.recipes.text.using.answering import Answered

Form = Literal["csv", "jsonl"]
FORMS: tuple[Form, ...] = ("csv", "jsonl")
_BEGINNINGS = (b"row,text,", b'{"row": ')


def prediction_lines(
    answers: "Iterable[Answered]", form: Form, *, classes: Sequence[str], has_pairs: bool
) -> Iterator[str]:
    """Lines with their ends: of CSV a header first. A row that could not be read has an error and no label."""
    if form == "jsonl":
        for answer in answers:
            yield json.dumps(_record(answer), ensure_ascii=False, allow_nan=False) + "\n"
        return
    halves = ("text", "text_pair") if has_pairs else ("text",)
    yield _csv(["row", *halves, "label", "probability", *(f"p:{name}" for name in classes), "error"])
    for answer in answers:
        question, verdict = answer.question, answer.verdict
        texts = [question.text, question.pair or ""][: len(halves)]
        if verdict is None:
            yield _csv([question.row, *texts, "", "", *[""] * len(classes), question.fault or ""])
            continue
        label = "|".join(verdict["labels"]) if "labels" in verdict else verdict["label"]
        shares = (f"{verdict['probabilities'][name]:.7g}" for name in classes)
        yield _csv([question.row, *texts, label, f"{verdict['probability']:.7g}", *shares, ""])


def is_answers(path: Path) -> bool:
    """Whether a file begins as our answers do (or is empty), so that newer ones may take its place."""
    try:
        with open_plain(path) as file:
            start = file.read(max(map(len, _BEGINNINGS)))
    except (OSError, WhetError):
        return False
    return not start or start.startswith(_BEGINNINGS)


def _record(answer: "Answered") -> dict[str, Any]:
    question = answer.question
    row: int | str = int(question.row) if question.row.isdecimal() else question.row
    if answer.verdict is None:
        return {"row": row, "error": question.fault}
    pair = {} if question.pair is None else {"text_pair": question.pair}
    return {"row": row, "text": question.text, **pair, **answer.verdict}


def _csv(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()
