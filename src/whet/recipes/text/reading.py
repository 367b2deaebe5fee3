"""Which texts does a config ask for? Yours, or the embedded ones."""

from pathlib import Path

from whet.recipes.text.config import TextConfig
from whet.recipes.text.corpus import Corpus
from whet.recipes.text.docstrings import read_docstrings
from whet.recipes.text.table import read_table


def read_corpus(config: TextConfig) -> Corpus:
    """The corpus behind `data` and `data_paths`."""
    paths = [Path(path) for path in (config.data, *config.data_paths) if path is not None]
    return read_table(*paths) if paths else read_docstrings()
