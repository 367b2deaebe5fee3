"""Which texts does a config ask for? Yours, or the embedded ones."""

import shlex
from pathlib import Path

from whet.recipes.text.config import TextConfig
from whet.recipes.text.corpus import Corpus
from whet.recipes.text.docstrings import read_docstrings
from whet.recipes.text.inspection.short_look import short_look
from whet.recipes.text.inspection.words import serious_lines
from whet.recipes.text.table import Texts, read_texts


def read_corpus(config: TextConfig) -> Corpus:
    """The corpus behind `data` and `data_paths`."""
    return read_told_corpus(config).corpus


def read_told_corpus(config: TextConfig) -> Texts:
    """The same, with what was understood and what is wrong with it, in a few lines."""
    paths = [Path(path) for path in (config.data, *config.data_paths) if path is not None]
    if not paths:
        return Texts(corpus=read_docstrings())
    read = read_texts(
        *paths, wishes=config.column_wishes, separator=config.label_separator, split_seed=config.split_seed
    )
    where = " or ".join(shlex.quote(str(path)) for path in paths[:3])
    return Texts(corpus=read.corpus, told=(*read.told, *serious_lines(short_look(read.corpus), where=where)))
