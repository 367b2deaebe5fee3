"""The embedded conversations: valid, deterministic and generated offline."""

import json
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import planted_chats as planted
from whet.base.errors import WhetError
from whet.recipes.chat import embedded
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.config import ChatConfig, data_facts, resolve_seq_len
from whet.recipes.chat.conversation import validate_turns
from whet.recipes.chat.embedded import embedded_conversations, open_embedded


def test_embedded_conversations_are_valid_and_answer_about_whet(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path))
    made = embedded_conversations()
    assert made == embedded_conversations()
    assert 2_000 < len(made) < 6_000
    assert all(validate_turns(turns) == turns for turns in made)
    answers = {asked.text: reported.text for turns in made for asked, reported in pairwise(turns)}
    assert answers["What does shutil.copy do?"].startswith("Copy data and mode bits")
    assert "the samples of one optimizer step" in answers["What is a global batch?"]

    data = open_embedded()
    assert data.manifest.splits["train"].conversations > 2_000
    assert data.val.num_documents > 20
    assert data.test.num_documents > 20
    monkeypatch.setattr(embedded, "prepare_data", lambda *_a, **_k: 1 / 0)
    assert open_embedded().fingerprint == data.fingerprint, "it is made again though it is there"
    logged = data_facts(ChatConfig())
    seq_len = resolve_seq_len(
        ChatArch(), longest=max(part.facts.longest for part in (data.train, data.val, data.test))
    ).seq_len
    assert isinstance(seq_len, int)
    assert resolve_seq_len(ChatArch(), longest=logged["longest"]).seq_len == seq_len, (
        "a plan without torch tells another model"
    )
    assert logged["vocab_size"] == data.tokenizer.vocab_size
    assert abs(logged["num_rows"] / data.train.repack(seq_len).num_rows - 1) < 0.1
    path = data.folder / "train" / "tokens.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ZeroDivisionError):
        open_embedded()


def test_read_only_home_folder_is_tolerated(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(embedded, "embedded_conversations", lambda: embedded_conversations()[:40])
    monkeypatch.setattr(embedded.tempfile, "tempdir", str(tmp_path))
    assert open_embedded().train.num_documents > 20


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path;"
        "from whet.recipes.chat.prepare import PrepareOptions, prepare_data;"
        "options = PrepareOptions(tokenizer=sys.argv[3]);"
        "prepare_data(Path(sys.argv[1]), Path(sys.argv[2]), options, on_progress=lambda *_: None);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for name, size in (("small", 20_000), ("large", 200_000)):
        with (tmp_path / name).open("w", encoding="utf-8") as file:
            for number in range(size):
                file.write(json.dumps(planted.talk(number)) + "\n")
        words = [str(tmp_path / name), str(tmp_path / f"{name}-out"), str(tmp_path / "small-out") if peaks else "bpe"]
        done = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout) * (1 if sys.platform == "darwin" else 1024))
    grown = (tmp_path / "large").stat().st_size - (tmp_path / "small").stat().st_size
    assert grown > 30e6
    assert peaks[1] - peaks[0] < grown / 2


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real limit on file sizes, in a separate process."""
    path = planted.write_lines(tmp_path / "chats.jsonl", [planted.talk(number, words=200) for number in range(400)])
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from whet.recipes.chat.prepare import PrepareOptions, prepare_data;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "options = PrepareOptions(vocab_size=600);"
        "prepare_data(Path(sys.argv[1]), Path(sys.argv[2]), options, on_progress=lambda *_: None)"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert WhetError.__name__ in done.stderr
    assert "EFBIG" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]
