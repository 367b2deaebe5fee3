"""Conversation formats: all are read record by record, and bad records are located."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import planted_chats as planted
from whet.base.errors import UsageError, WhetError
from whet.recipes.chat import json_records
from whet.recipes.chat.conversation import Conversation
from whet.recipes.chat.sources import RejectedRecord, find_files, read_conversations
from whet.recipes.chat.tokenizer import ChatTokenizer


def read(path: Path, *, shape: str = "auto") -> list[Conversation | RejectedRecord]:
    (source,) = find_files(path, format_name=shape)
    return list(read_conversations(source))


def turns(result: Conversation | RejectedRecord) -> list[tuple[str, str]]:
    assert isinstance(result, Conversation), result
    return [tuple(turn) for turn in result.turns]


@pytest.mark.parametrize("name", planted.GOLDEN)
@pytest.mark.parametrize("write", [planted.write_array, planted.write_lines])
def test_every_format_is_detected_and_read(tmp_path: Path, name: str, write) -> None:
    shape, records, expected = planted.GOLDEN[name]
    path = write(tmp_path / "chats", records)
    (source,) = find_files(path)
    assert source.format.name == shape
    (result,) = read_conversations(source)
    assert turns(result) == expected


def test_flat_dump_gives_one_conversation_per_tree_and_rejects_orphans(tmp_path: Path) -> None:
    second = [{**row, "message_tree_id": "m9", "message_id": f"9{row['message_id']}"} for row in planted.FLAT[:1]]
    answer = planted.message("93", second[0]["message_id"], "assistant", "Nine.", message_tree_id="m9")
    orphan = planted.message("o", "gone", "assistant", "Whose?", message_tree_id="m7")
    first, other, bad = read(planted.write_lines(tmp_path / "flat", [*planted.FLAT, *second, answer, orphan]))
    assert turns(first) == planted.BRANCH
    assert turns(other) == [("user", "Hi"), ("assistant", "Nine.")]
    assert bad == RejectedRecord("flat:9 (m7)", "its messages do not form a tree with one root")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, "zstd"], ids=["gz", "bz2", "xz", "zst"])
def test_compressed_files_are_read_by_their_first_bytes(tmp_path: Path, pack) -> None:
    plain = "".join(json.dumps(planted.talk(n)) + "\n" for n in range(50)).encode()
    if pack == "zstd":
        pyarrow = pytest.importorskip("pyarrow")
        packed = pyarrow.compress(plain, codec="zstd", asbytes=True)
    else:
        packed = pack(plain)
    (tmp_path / "chats.json").write_bytes(packed)
    assert len(read(tmp_path / "chats.json")) == 50
    (tmp_path / "cut").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(WhetError, match="is damaged"):
        read(tmp_path / "cut")


@pytest.mark.parametrize("defect", planted.DEFECTS)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_bad_record_is_located_and_does_not_affect_others(tmp_path: Path, defect: str, form: str) -> None:
    record, why = planted.DEFECTS[defect]
    good = json.dumps(planted.SHAREGPT).encode()
    both = (good, record, good)
    content = b"\n".join(both) if form == "lines" else b"[" + b",\n".join(both) + b"]"
    (tmp_path / "chats").write_bytes(b"\xef\xbb\xbf" + content)
    first, bad, last = read(tmp_path / "chats", shape="sharegpt")
    assert turns(first) == turns(last)
    assert isinstance(bad, RejectedRecord)
    assert bad.where.startswith("chats:2")
    assert why in bad.why


@pytest.mark.parametrize("chunk", [7, 64, 1024**2])
def test_records_do_not_depend_on_chunk_boundaries(tmp_path: Path, chunk: int, monkeypatch) -> None:
    records = [planted.SHAREGPT, planted.talk(1), {"a": '\u20ac}]\\"', "b": [[], {}, -1.5e3, None]}, planted.talk(2)]
    for write, spare in ((planted.write_array, []), (planted.write_lines, []), (planted.write_array, records * 20)):
        path = write(tmp_path / "chats", records + spare)
        monkeypatch.setattr(json_records, "_CHUNK", chunk)
        assert [record.value for record in json_records.read_records(path)] == records + spare
    numbers = list(range(10**6, 10**6 + 9))
    path = planted.write_array(tmp_path / "numbers", numbers)
    assert [record.value for record in json_records.read_records(path)] == numbers


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"id,text\n", "neither a JSON array nor JSON lines"),
        (b'[{"a": 1}, {"a": [1, 2', "record 2 has no end.*\n.*the file ends inside"),
        (b'[{"a": 1}, {"a": "x}]', "record 2 has no end.*\n.*the file ends inside"),
        (b'[{"a": 1} {"a": 2}]', "record 1 has no end"),
        (b'[{"a": 1}', "record 1 has no end"),
        (b'[{"a": 1}] [', "continues after its array"),
        (b"\xff\xfe[\x00", "is not UTF-8"),
        (b"PK\x03\x04", "is an archive"),
    ],
)
def test_unreadable_file_is_an_error(tmp_path: Path, content: bytes, reported: str) -> None:
    (tmp_path / "chats").write_bytes(content)
    with pytest.raises(WhetError, match=reported):
        list(json_records.read_records(tmp_path / "chats"))


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"[]", "no records"),
        (b'[1, "a"]', "record 1: not an object"),
        (b'{\n "messages": []\n}', "record 1: not JSON: EOF"),
        ('{"messages": "caf\xe9"}'.encode("latin-1"), "record 1: not JSON: invalid unicode"),
    ],
)
def test_unreadable_records_are_an_error_with_the_reason(tmp_path: Path, content: bytes, reported: str) -> None:
    (tmp_path / "chats").write_bytes(content)
    with pytest.raises(UsageError, match=f"no known format\n.*{reported}"):
        find_files(tmp_path / "chats")


def test_pipe_is_an_error_and_ids_are_printed_on_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="needs a regular file"):
        find_files(tmp_path / "pipe", format_name="openai")
    path = planted.write_lines(tmp_path / "chats", [{"id": "a\n\x1b[31mb", "messages": []}])
    (bad,) = read(path)
    assert isinstance(bad, RejectedRecord)
    assert bad.where == "chats:1 (a  [31mb)"


def test_unknown_format_is_an_error_with_its_keys(tmp_path: Path) -> None:
    path = planted.write_lines(tmp_path / "chats", [{"question": "a", "answer": "b"}])
    with pytest.raises(UsageError, match="question, answer"):
        find_files(path)


def test_oversized_record_is_skipped_in_lines_and_an_error_in_arrays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(json_records, "MAX_RECORD_BYTES", 4096)
    monkeypatch.setattr(json_records, "_CHUNK", 512)
    records = [planted.talk(1), planted.talk(2, words=2000), planted.talk(3)]
    first, bad, last = read(planted.write_lines(tmp_path / "lines", records))
    assert isinstance(bad, RejectedRecord)
    assert "longer than 4,096 bytes" in bad.why
    assert [turns(one)[0][1].split()[2] for one in (first, last)] == ["word7", "word21"]
    with pytest.raises(WhetError, match="record 2 has no end"):
        read(planted.write_array(tmp_path / "array", records))


def test_trm_folder_is_decoded_to_texts(tmp_path: Path) -> None:
    """Composed by its description: a conversation a row, PAD behind it, marks as special tokens, a cut turn last."""
    engine = Tokenizer.from_str(ChatTokenizer.train(["Hello there."], vocab_size=300).to_json())
    marks = ["<|pad|>", "<|user|>", "<|enduser|>", "<|assistant|>", "<|endassistant|>", "<|sep|>", "<|endoftext|>"]
    engine.add_special_tokens(marks)
    pad = engine.token_to_id("<|pad|>")
    whole = "<|user|>Hi \u20ac<|enduser|><|sep|><|assistant|>Hello.<|endassistant|>"
    texts = [f"{whole}<|endoftext|>", f"{whole}<|sep|><|user|>More?<|enduser|><|sep|><|assistant|>Cut he"]
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        rows = np.full((2, 64), pad, dtype=np.int32)
        for row, text in zip(rows, texts, strict=True):
            ids = engine.encode(text).ids
            row[: len(ids)] = ids
        np.save(tmp_path / part / "all__inputs.npy", rows)
        (tmp_path / part / "dataset.json").write_text(json.dumps({"pad_id": pad, "seq_len": 64}))
    (tmp_path / "tokenizer").mkdir()
    engine.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    train, test = find_files(tmp_path)
    assert (train.split, test.split, train.format.name) == ("train", "test", "trm-folder")
    expected = [("user", "Hi \u20ac"), ("assistant", "Hello.")]
    assert [turns(result) for result in read_conversations(test)] == [expected, expected]
    np.save(tmp_path / "train" / "all__inputs.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(WhetError, match="not an array of numbers"):
        list(read_conversations(train))
