"""What is seriously wrong with a corpus that is about to be trained on? Only what is cheap to tell from memory."""

from collections import Counter

from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.folding import folded
from whet.recipes.text.inspection.label_checks import header_labels, misspelt
from whet.recipes.text.inspection.label_in_text import says_label
from whet.recipes.text.inspection.repeats import DEV, TEST, TRAIN, Texts
from whet.recipes.text.inspection.report import Finding, Findings
from whet.recipes.text.inspection.text_checks import put_right


def short_look(corpus: Corpus) -> tuple[Finding, ...]:
    """Repeats, contradictions, labels that are probably wrong, and texts that say their label; without places."""
    findings, texts = Findings(), Texts()
    counts: Counter[str] = Counter()
    names = [name.casefold() for name in corpus.classes]
    for number, part in ((TRAIN, corpus.train), (DEV, corpus.dev), (TEST, corpus.test)):
        for row, labels in enumerate(_label_sets(part)):
            pair = part.pairs[row] if part.pairs else None
            same = folded(*put_right(part.texts[row], pair))
            texts.add(f"{part.texts[row]}\0{pair}", same, label=hash(labels) & 0x7FFFFFFF, part=number)
            counts.update(corpus.classes[label] for label in labels)
            if any(says_label(same, names[label]) for label in labels):
                findings.add("label-in-text")
    for repeat in texts.repeats():
        findings.add(repeat.kind)
    findings.add("misspelt-label", count=len(misspelt(counts)))
    findings.add("header", count=sum(counts[name] for name in header_labels(counts, label_column=None)))
    return tuple(finding for finding in findings.done() if finding.is_serious)


def _label_sets(part: Examples) -> tuple[tuple[int, ...], ...]:
    return part.label_sets or tuple((label,) for label in part.labels)
