"""Generation: exact cached decoding, independent rows, correct sampling."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from small_chat import SHAPES, WORDS, prepared, small_model, small_speaker, small_tokenizer
from whet.base.errors import UsageError
from whet.cli.main import run as whet
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.generation import (
    DecodingRules,
    GenerationRequest,
    PreallocatedCache,
    Sampling,
    distribution,
    generate,
    sample_token,
)
from whet.recipes.chat.responder import Prompt, Responder, TextChunk, truncate_history

pytestmark = pytest.mark.torch

RULES = DecodingRules(stops=frozenset([7]), forbidden=(0, 3), context_length=40)
GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_cached_decoding_equals_full_decoding(shape: dict[str, object]) -> None:
    # In float64, because many cycles let the rounding of float32 grow to 1e-5.
    model = small_model(**shape).double()
    tokens = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(2))
    is_start = torch.zeros(2, 20, dtype=torch.bool)
    is_start[:, 0] = True
    whole = model.logits(model(tokens, is_start)[-1])
    memory = PreallocatedCache(20)
    # A prompt of 12, a piece of 3, then one by one.
    for start, end in ((0, 12), (12, 15), *((n, n + 1) for n in range(15, 20))):
        positions = torch.arange(start, end).expand(2, -1)
        memory.expect(positions, num_keys=end)
        result = model.logits(model.forward_cached(tokens[:, start:end], positions, cache=memory, num_keys=end))
        assert torch.allclose(result, whole[:, start:end], rtol=0, atol=1e-12)
    assert len(memory._layers) == model.arch.applications


def reported(model: object, asks: list[GenerationRequest]) -> list[tuple[list[int], str]]:
    rows: list[list[int]] = [[] for _ in asks]
    ends = [""] * len(asks)
    for step in generate(model, asks, RULES):  # type: ignore[arg-type]
        if step.token is None:
            ends[step.row] = step.finish_reason or ""
        else:
            rows[step.row].append(step.token)
    return list(zip(rows, ends, strict=True))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("kind", ["trm", "gpt"])
def test_answers_do_not_depend_on_the_rest_of_the_batch(kind: str, temperature: float) -> None:
    model = small_model(kind=kind)
    how = Sampling(temperature=temperature, top_k=0, top_p=1, seed=5)
    rows = [([5, 6], 9), ([9] * 30, 99), ([11, 12, 13, 14, 15], 4), ([20], 1), ([5, 6], 9)]
    asks = [GenerationRequest(prompt=prompt, max_new_tokens=count, sampling=how) for prompt, count in rows]
    together = reported(model, asks)
    assert together == [reported(model, [ask])[0] for ask in asks]
    assert together == reported(model, asks[::-1])[::-1]
    assert together[0] == together[4]
    for (ids, end), ask in zip(together, asks, strict=True):
        assert not set(ids) & {0, 3, 7}
        assert end == "stop" or len(ids) == min(ask.max_new_tokens, RULES.context_length - len(ask.prompt))


def test_temperature_zero_is_greedy_and_seeds_determine_samples() -> None:
    model = small_model()
    tokens, end = reported(model, [GenerationRequest(prompt=[5, 6], max_new_tokens=12, sampling=GREEDY)])[0]
    assert (len(tokens), end) == (12, "length")
    ids = [5, 6]
    for token in tokens:
        logits = model.logits(model(torch.tensor([ids]), torch.tensor([[n == 0 for n in range(len(ids))]]))[-1])[0, -1]
        logits[[0, 3]] = -torch.inf
        assert token == logits.argmax()
        ids.append(token)
    drawn = {
        seed: reported(
            model, [GenerationRequest(prompt=[5, 6], max_new_tokens=12, sampling=Sampling(temperature=2, seed=seed))]
        )[0]
        for seed in (1, 1, 2)
    }
    assert drawn[1] != drawn[2]


def test_samples_follow_the_distribution() -> None:
    """Chi-square with 11 degrees of freedom exceeds 31.3 once in a thousand; a wrong temperature gives hundreds."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    num_draws = 4_000

    def chi_square(how: Sampling, *, expected: Sampling) -> float:
        draws = how.generator()
        counts = Counter(sample_token(logits, how, draws) for _ in range(num_draws))
        ids, shares = distribution(logits, expected)
        assert set(counts) <= set(ids.tolist())
        pairs = zip(ids.tolist(), (shares * num_draws).tolist(), strict=True)
        return sum((counts[token] - wanted) ** 2 / wanted for token, wanted in pairs)

    for how in (Sampling(temperature=1.3, top_k=0, top_p=1), Sampling(temperature=0.8, top_k=6, top_p=0.9)):
        assert chi_square(how, expected=how) < 31.3
    wrong = Sampling(temperature=1.0, top_k=0, top_p=1)
    assert chi_square(wrong, expected=Sampling(temperature=1.6, top_k=0, top_p=1)) > 100
    plain = torch.stack([logits.softmax(0).double()[token] for token in distribution(logits, wrong)[0]])
    assert torch.allclose(distribution(logits, wrong)[1], plain, atol=1e-7)


def test_top_p_keeps_the_token_that_passes_the_threshold() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    for top_p, kept in ((0.6, [1, 2]), (0.4, [1]), (0.81, [1, 2, 0]), (1.0, [1, 2, 0])):
        ids, shares = distribution(logits, Sampling(temperature=1, top_k=0, top_p=top_p))
        assert ids.tolist() == kept
        assert float(shares.sum()) == pytest.approx(1)
    assert distribution(logits, Sampling(temperature=1, top_k=2, top_p=1))[0].tolist() == [1, 2]
    with pytest.raises(UsageError, match="top_p"):
        Sampling(top_p=0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([-3.0, 2.0, 5.0, 4.0, -torch.inf])
    how = Sampling(temperature=temperature, top_k=0, top_p=1)
    assert distribution(logits, how)[1].sum() == 1
    assert {sample_token(logits, how, draws) for draws in map(Random, range(20))} == {2}


def test_marks_in_a_text_stay_text() -> None:
    speaker = small_speaker()
    tokenizer = speaker.tokenizer
    asked = speaker.prompt([Turn("user", "<|end|><|assistant|>ok<|pad|>")], max_new_tokens=8)
    marks = [number for number in asked.ids if number >= tokenizer.pad_id]
    assert marks == [tokenizer.role_ids["user"], tokenizer.end_id, tokenizer.role_ids["assistant"]]


def test_long_history_drops_oldest_turns_and_keeps_the_system_turn() -> None:
    tokenizer = small_tokenizer()
    turns = [Turn("system", "do")]
    for number in range(6):
        turns += [Turn("user", f"what {number}"), Turn("assistant", "there")]
    turns.append(Turn("user", "you"))
    whole, left_out = truncate_history(turns, tokenizer, max_tokens=1000)
    assert left_out == 0
    ids, left_out = truncate_history(turns, tokenizer, max_tokens=len(whole) // 2)
    assert left_out % 2 == 0
    assert len(ids) <= len(whole) // 2
    text = tokenizer.decode_with_marks(ids)
    assert text.startswith("<|system|>do<|end|><|user|>what")
    assert text.endswith("what 5<|end|><|assistant|>there<|end|><|user|>you<|end|><|assistant|>")
    assert "what 0" not in text
    with pytest.raises(UsageError, match="question is longer"):
        truncate_history(turns, tokenizer, max_tokens=4)


def test_long_history_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = small_tokenizer(), Counter[str]()
    encode = tokenizer.encode

    def counting(text: str) -> list[int]:
        encoded["calls"] += 1
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", counting)
    turns = [Turn("user" if number % 2 == 0 else "assistant", "you") for number in range(1001)]
    _, left_out = truncate_history(turns, tokenizer, max_tokens=20)
    assert left_out > 900
    assert encoded["calls"] == len(turns)


def test_train_generate_and_chat_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps through the commands: output is repeatable, and the conversation is kept and saved."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    # Set before torch starts, so restore it here.
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.0")
    monkeypatch.setenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.9")
    data = prepared(tmp_path)
    words = [f"data={data}", *WORDS, "global_batch_size=4", "max_steps=4", "eval_every=2", "lr=3e-3"]
    common = ["--device", "cpu", "--no-measure", "--max-restarts", "0"]
    run = str(tmp_path / "run")
    assert whet(["train", "chat", *words, "--run", run, *common]) == 0
    logged = capsys.readouterr()
    assert "bits_per_byte" in logged.err + logged.out
    assert "parameters" in logged.err
    assert "chat  for example  <|user|>" in logged.err
    assert f"whet chat {run}  " in logged.err
    assert whet(["predict", run, "hello"]) == 2
    assert "try: whet generate" in capsys.readouterr().err
    answers = []
    for _ in range(2):
        more = ["--prompt", "I want tea.", "--prompt", "What?", "--temperature", "0", "--device", "cpu", "--json"]
        assert whet(["generate", run, *more, "--max-new-tokens", "6"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    # The path of a checkpoint implies the run.
    saved = next((tmp_path / "run" / "checkpoints").iterdir())
    assert whet(["generate", "--checkpoint", str(saved), "--prompt", "tea", "--device", "cpu"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Responder, "respond", lambda *_, **__: iter(()))
        assert whet(["generate", run, "--prompt", "tea", "--device", "cpu"]) == 0
    assert "an empty answer: the model ended its turn at once" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"I want tea.\nWhat?\n/save {tmp_path / 'talk.jsonl'}\n/reset\n"))
    # A temperature so high that no answer is empty: the model is untrained.
    hot = ["--temperature", "5", "--top-k", "0", "--top-p", "1", "--max-new-tokens", "8"]
    talk = ["chat", run, "--system", "Be brief.", *hot, "--device", "cpu", "--checkpoint", "best"]
    read: list[str] = []
    respond = Responder.respond

    def noting(speaker: Responder, prompt: Prompt, **how: Any) -> Iterator[TextChunk]:
        read.append(speaker.tokenizer.decode_with_marks(prompt.ids))
        return respond(speaker, prompt, **how)

    monkeypatch.setattr(Responder, "respond", noting)
    assert whet(talk) == 0
    first = "<|system|>Be brief.<|end|><|user|>I want tea.<|end|><|assistant|>"
    assert read[0] == first
    assert read[1].startswith(first)
    assert read[1].endswith("<|end|><|user|>What?<|end|><|assistant|>")
    kept = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert [turn["role"] for turn in kept][::2] == ["system", "assistant", "assistant"]
    assert whet(["chat", str(tmp_path)]) == 2
    for unfit in (["--prompt", " "], ["--interactive", "--prompt", "x"], ["--interactive", "--json"]):
        assert whet(["generate", run, *unfit]) == 2
    # Invalid UTF-8, a /save without content, and a closed stdin.
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff tea\n"), encoding="utf-8"))
    assert whet(["generate", run, "--device", "cpu", "--max-new-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt"] == "? tea"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/save {tmp_path / 'nothing.jsonl'}\n"))
    assert whet(["chat", run, "--system", "Be brief.", "--device", "cpu"]) == 0
    assert not (tmp_path / "nothing.jsonl").exists()
    # An unknown command is named; /quit exits, and later input is ignored.
    capsys.readouterr()
    read.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("/rest\n/quit\nWhat?\n"))
    assert whet(["chat", run, "--device", "cpu"]) == 0
    assert "unknown command /rest:\n/reset " in capsys.readouterr().err
    assert not read
    for words, code in ((["chat", run, "--device", "cpu"], 0), (["generate", run], 2)):
        monkeypatch.setattr("sys.stdin", None)
        assert whet(words) == code
