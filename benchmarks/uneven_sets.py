"""Small, uneven copies of SciCite and CSAbstruct, to compare text models where some classes are rare.

    python benchmarks/uneven_sets.py DIR/sci-cite OUT --rare method [result ...] [--rows 1500] [--share 0.02] [--seed 0]

OUT gets train.jsonl, dev.jsonl and test.jsonl, drawn from the published splits. Each rare class has --share of every
split. The other classes keep their proportions. dev has a third of the training rows; test is as large as it can be.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

Row = tuple[str, str]
"""A text and its label."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rare", nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    given.out.mkdir(parents=True)
    for split, number in (("train", given.rows), ("dev", given.rows // 3), ("test", None)):
        rows = draw(read_split(given.source, split), given.rare, share=given.share, number=number, rng=rng)
        lines = (json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        (given.out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{given.out}/{split}.jsonl", len(rows), dict(Counter(label for _, label in rows).most_common()))


def read_split(folder: Path, split: str) -> list[Row]:
    """Read a split of SciCite (a text in each line) or CSAbstruct (an abstract of several sentences)."""
    (path,) = folder.glob(f"{split}.*")
    return list(_rows(path.read_text(encoding="utf-8").splitlines()))


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    for record in map(json.loads, lines):
        if "sentences" in record:
            yield from zip(record["sentences"], record["labels"], strict=True)
        else:
            yield record["text"], record["label"]


def draw(rows: list[Row], rare: list[str], *, share: float, number: int | None, rng: np.random.Generator) -> list[Row]:
    """Draw `number` rows, or as many as the other classes have, with `share` of them in each rare class."""
    by_class: dict[str, list[Row]] = {}
    for row in dict.fromkeys(rows):
        by_class.setdefault(row[1], []).append(row)
    common = sum(len(part) for label, part in by_class.items() if label not in rare)
    number = number or round(common / (1 - share * len(rare)))
    num_rare = round(share * number)
    rest = number - num_rare * len(rare)
    drawn: list[Row] = []
    for label in sorted(by_class):
        wanted = num_rare if label in rare else round(rest * len(by_class[label]) / common)
        places = rng.permutation(len(by_class[label]))[:wanted]
        drawn += [by_class[label][place] for place in places]
    return [drawn[place] for place in rng.permutation(len(drawn))]


if __name__ == "__main__":
    main()
