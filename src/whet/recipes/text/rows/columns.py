"""Which columns are the text, its second half, the label and the group? Yours, or guessed by their names."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from whet.base.errors import UsageError, nearest

TEXT_NAMES = (
    *("text", "sentence", "content", "review", "comment", "message", "body", "document", "abstract", "string"),
    *("utterance", "tweet", "headline", "title", "question", "query", "post", "description", "texts", "sentences"),
)
LABEL_NAMES = (
    *("label", "category", "class", "target", "intent", "sentiment", "topic", "tag", "labels", "categories", "classes"),
    *("intents", "topics", "tags", "genre", "genres", "relation", "stance", "emotion", "gold_label", "label_text"),
)
PAIR_NAMES = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2")),
    *(("text_a", "text_b"), ("sentence_a", "sentence_b"), ("text", "text_pair"), ("question", "sentence")),
)


class Wishes(BaseModel):
    """The columns that you name; None is guessed, and pairs and groups without a name are none."""

    model_config = ConfigDict(frozen=True)

    text: str | None = None
    label: str | None = None
    pair: str | None = None
    group: str | None = None


class Columns(BaseModel):
    """Names of columns, as the file spells them."""

    model_config = ConfigDict(frozen=True)

    text: str
    label: str | None
    """None where the rows have no label, as test rows of a contest."""
    pair: str | None = None
    group: str | None = None

    def told(self) -> str:
        """What was understood, in words.

        >>> Columns(text="string", label="label").told()
        'text = string, label = label'
        """
        named = (("text", self.text), ("pair", self.pair), ("label", self.label), ("group", self.group))
        return ", ".join(f"{what} = {name}" for what, name in named if name is not None)


def find_columns(names: Iterable[str], wishes: Wishes, *, path: Path, needs_label: bool = True) -> Columns:
    """The columns of a file with these names."""
    spelled: dict[str, str] = {}
    for name in names:
        spelled.setdefault(str(name).strip().lower(), str(name))
    text = _wished(wishes.text, "text", spelled, path=path)
    label = _wished(wishes.label, "label", spelled, path=path, is_needed=needs_label)
    pair = _wished(wishes.pair, "pair", spelled, path=path)
    group = _wished(wishes.group, "group", spelled, path=path)
    if text is None and pair is None:
        text, pair = next(
            ((spelled[a], spelled[b]) for a, b in PAIR_NAMES if a in spelled and b in spelled), (None, None)
        )
    taken = {label, pair, group}
    text = text or _guessed("text", TEXT_NAMES, spelled, taken=taken, path=path)
    assert text is not None
    label = label or _guessed(
        "label", LABEL_NAMES, spelled, taken={text, pair, group}, path=path, is_needed=needs_label
    )
    return Columns(text=text, label=label, pair=pair, group=group)


def _wished(wish: str | None, what: str, spelled: dict[str, str], *, path: Path, is_needed: bool = True) -> str | None:
    if wish is None:
        return None
    found = spelled.get(wish.strip().lower())
    if found is None and is_needed:
        meant = nearest(wish.lower(), spelled)
        raise UsageError(
            f"{path} has no column {wish!r}",
            got="columns " + ", ".join(spelled.values())[:200],
            try_=f"{what}_column={spelled[meant] if meant else 'NAME'}",
        )
    return found


def _guessed(
    what: str,
    names: tuple[str, ...],
    spelled: dict[str, str],
    *,
    taken: set[str | None],
    path: Path,
    is_needed: bool = True,
) -> str | None:
    found = next((spelled[name] for name in names if name in spelled and spelled[name] not in taken), None)
    if found is None and is_needed:
        raise UsageError(
            f"{path} has no {what} column",
            got="columns " + ", ".join(spelled.values())[:200],
            try_=f"{what}_column=NAME, or name it {what!r} (also understood: {', '.join(names[1:])})",
        )
    return found
