"""The tokenizer: deterministic training, lossless encoding, serialization, forks."""

import json
import subprocess
import sys

import pytest

from whet.base.errors import WhetError
from whet.recipes.text.config import TextArch
from whet.recipes.text.corpus import Corpus, Examples
from whet.recipes.text.data import token_column, tokenize
from whet.recipes.text.tokenizer import PAD_ID, Tokenizer

pytestmark = pytest.mark.torch

TEXTS = [f"Return the {a} of a {b}." for a in ("sum", "length", "norm", "degree") for b in ("graph", "tensor", "list")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=320)


def test_the_same_texts_give_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert len({Tokenizer.train(TEXTS, vocab_size=320).to_json() for _ in range(5)} | {tokenizer.to_json()}) == 1


def test_it_survives_serialization(tokenizer: Tokenizer) -> None:
    json.loads(tokenizer.to_json())
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.encode(TEXTS, max_length=64) == tokenizer.encode(TEXTS, max_length=64)


def test_invalid_tokenizers_are_rejected() -> None:
    with pytest.raises(WhetError, match="cannot read a saved tokenizer"):
        Tokenizer.from_json("{}")


def test_every_text_can_be_encoded(tokenizer: Tokenizer) -> None:
    for text in ("naïve café", "\N{SNOWMAN} 雪だるま", "a\tb\n  c", "\x00\x7f"):
        (ids,) = tokenizer.encode([text], max_length=1000)
        assert tokenizer.decode(ids).strip(" ") == text
        assert PAD_ID not in ids


def test_ids_stay_inside_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size <= 320
    assert max(max(ids) for ids in tokenizer.encode(TEXTS, max_length=64)) < tokenizer.vocab_size


def test_the_padding_token_in_a_text_is_plain_text(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["a <pad> b"], max_length=64)
    assert PAD_ID not in ids


def test_lower_case_and_truncation(tokenizer: Tokenizer) -> None:
    upper, lower = tokenizer.encode(["RETURN THE SUM", "return the sum"], max_length=64)
    assert upper == lower
    assert tokenizer.encode(["return the sum"], max_length=2) == [lower[:2]]


def test_an_empty_text_has_one_token(tokenizer: Tokenizer) -> None:
    assert all(len(ids) > 0 for ids in tokenizer.encode(["", " "], max_length=8))


def test_a_later_fork_prints_no_warning() -> None:
    script = (
        "import os\n"
        "from whet.recipes.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.train(['some words to learn from'] * 3000, vocab_size=300)\n"
        "tokenizer.encode(['some words'] * 3000, max_length=9)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(len(tokenizer.encode(['some words'] * 3000, max_length=9)) != 3000)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_tokenized_splits_contain_every_row() -> None:
    parts = [Examples(texts=tuple(TEXTS[n:m]), labels=tuple(range(m - n))) for n, m in ((0, 6), (6, 8), (8, 12))]
    corpus = Corpus(classes=tuple("abcdef"), train=parts[0], val=parts[1], test=parts[2])
    arch = TextArch(vocab_size=300, max_length=5)
    tokenizer = Tokenizer.train(corpus.train.texts, vocab_size=arch.vocab_size)
    data = tokenize(corpus, tokenizer=tokenizer, max_length=arch.max_length)
    for columns, part in ((data.train, parts[0]), (data.val, parts[1]), (data.test, parts[2])):
        ids = tokenizer.encode(part.texts, max_length=5)
        assert [columns["tokens"][row].tolist() for row in range(len(part))] == ids
        assert columns["label"].tolist() == list(part.labels)
    assert data.classes == corpus.classes
    assert data.fingerprint == corpus.fingerprint
    assert data.mean_length == sum(map(len, tokenizer.encode(parts[0].texts, max_length=5))) / 6
    assert tokenizer.to_json() == Tokenizer.train(parts[0].texts, vocab_size=300).to_json(), "learned from test texts"
    assert token_column(["a", ""], tokenizer=tokenizer, max_length=5).pad_value == PAD_ID
