"""The chat recipe: a causal model that learns to answer. torch is imported when it is needed, so a plan needs none."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from whet.base.errors import DataChangedError, UsageError
from whet.base.version import VERSION
from whet.plan.workload import Workload
from whet.recipes.chat import config as chat_config
from whet.recipes.chat.architecture import PRESETS
from whet.recipes.chat.config import ChatConfig
from whet.recipes.recipe import EmbeddedData, Recipe, explain_data_change
from whet.run.folder import open_run

if TYPE_CHECKING:
    from torch import Tensor

    from whet.data.batch import MicroBatch
    from whet.recipes.chat.data import ChatData
    from whet.recipes.chat.model import CausalModel
    from whet.recipes.chat.responder import Responder


_EMBEDDED = EmbeddedData(
    is_made="the embedded talks are made from whet itself and from Python's library",
    sources={"whet": "whet", "python": "Python"},
    otherwise=f"whet has changed since (still {VERSION}, with other files)",
    instead="talks of your own (whet data chat)",
)


class ChatRecipe(Recipe):
    """Learns from conversations; by default from whet's own help and Python's."""

    name = "chat"
    Config = ChatConfig
    goal = "bits_per_byte"
    lower_is_better = ("bits_per_byte", "perplexity", "cross_entropy")
    presets: ClassVar[dict[str, dict[str, str]]] = {name: {"arch.preset": name} for name in PRESETS}
    _data: "ChatData | None" = None
    """What was read last: an evaluation shows answers to its questions."""

    def describe(self, config: ChatConfig, data: "ChatData | None" = None) -> Workload:
        if data is not None:
            known: dict[str, Any] = {"vocab_size": data.tokenizer.vocab_size, "num_rows": data.num_rows}
            return chat_config.describe_chat(config, longest=data.longest, **known)
        return chat_config.describe_chat(config, **chat_config.data_facts(config))

    def data(self, config: ChatConfig) -> "ChatData":
        from whet.recipes.chat.data import read_chat

        self._data = read_chat(config)
        if config.init_from is not None:
            check_vocabulary(self._data, open_run(config.init_from).metadata, where=config.init_from)
        return self._data

    def model(self, config: ChatConfig, data: "ChatData") -> "CausalModel":
        from whet.recipes.chat.model import build_model

        return build_model(data.arch, vocab_size=data.tokenizer.vocab_size, dropout=config.dropout)

    def loss(self, model: "CausalModel", micro: "MicroBatch") -> "tuple[Tensor, Tensor]":
        from whet.recipes.chat.model import next_token_loss

        return next_token_loss(model, micro)

    def outputs(self, model: "CausalModel", micro: "MicroBatch") -> "Tensor":
        """What comes out at every place: before the first step it is tried whether that is causal."""
        from whet.recipes.chat.model import model_inputs

        return model.logits(model(*model_inputs(micro))[-1])

    def evaluate(self, model: "CausalModel", micro_batches: Iterator["MicroBatch"]) -> dict[str, Any]:
        from whet.recipes.chat.evaluation import evaluate

        return evaluate(model, micro_batches, self._data)

    def tally(self, model: "CausalModel", micro_batches: Iterator["MicroBatch"]) -> list[float]:
        from whet.recipes.chat.evaluation import tally

        return tally(model, micro_batches)

    def conclude(self, model: "CausalModel", tallies: list[list[float]]) -> dict[str, Any]:
        from whet.recipes.chat.evaluation import conclude

        return conclude(model, tallies, self._data)

    def metadata(self, config: ChatConfig, data: "ChatData") -> dict[str, Any]:  # noqa: ARG002
        from whet.recipes.chat.responder import responder_metadata

        return {**responder_metadata(data.tokenizer, data.arch), "data": data.fingerprint}

    def explain_changed_data(
        self, error: DataChangedError, config: ChatConfig, versions: Mapping[str, str | None]
    ) -> UsageError:
        """Only the embedded conversations change by themselves."""
        return error if chat_config.data_folders(config) else explain_data_change(error, _EMBEDDED, versions)

    def speak(self, kept: dict[str, Any]) -> "Responder":
        """Who answers, without weights yet."""
        from whet.recipes.chat.responder import restore_responder

        return restore_responder(kept)


def check_vocabulary(data: "ChatData", kept: dict[str, Any], *, where: str) -> None:
    """Weights that are taken over know the old tokens."""
    if kept.get("tokenizer") != data.tokenizer.to_json():
        raise UsageError(
            f"{where} has another tokenizer than the data",
            got=f"{kept.get('vocab_size', 'no')} tokens there, {data.tokenizer.vocab_size} here",
            try_="whet data chat ... with the tokenizer of the first data",
        )


def recipe() -> ChatRecipe:
    return ChatRecipe()
