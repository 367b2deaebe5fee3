"""How do answers become lines of CSV or JSON? No torch."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from whet.recipes.text.using.answering import Answered

Form = Literal["csv", "jsonl"]
FORMS: tuple[Form, ...] = ("csv", "jsonl")


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
