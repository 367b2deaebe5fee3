"""The chat recipe: train a causal language model on conversations.

Methods import torch lazily, so that a training plan can be made without it.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from whet.base.errors import DataChangedError, UsageError
from whet.base.version import VERSION
from whet.plan.workload import Workload
from whet.recipes.chat.config import ChatConfig, data_facts, data_folders, describe_chat
from whet.recipes.recipe import EmbeddedData, Recipe, explain_data_change
from whet.run.folder import open_run

if TYPE_CHECKING:
    from torch import Tensor

    from whet.data.batch import DictBatch
    from whet.recipes.chat.data import ChatData
    from whet.recipes.chat.model import CausalModel
    from whet.recipes.chat.responder import Responder


_EMBEDDED = EmbeddedData(
    is_made="the embedded conversations are generated from whet and Python's library",
    sources={"whet": "whet", "python": "Python"},
    otherwise=f"whet has changed since (still {VERSION}, with other files)",
    instead="your own conversations (whet data chat)",
)


class ChatRecipe(Recipe):
    """Trains a chat model on conversations: by default, questions about whet and Python."""

    name = "chat"
    Config = ChatConfig
    goal = "bits_per_byte"
    # The data that was read last. Evaluations show answers to some of its questions.
    _data: "ChatData | None" = None

    def describe(self, config: ChatConfig, data: "ChatData | None" = None) -> Workload:
        if data is None:
            return describe_chat(config, **data_facts(config))
        vocab_size = data.tokenizer.vocab_size
        return describe_chat(config, vocab_size=vocab_size, longest=data.longest, num_rows=data.num_rows)

    def data(self, config: ChatConfig) -> "ChatData":
        from whet.recipes.chat.data import read_chat

        self._data = read_chat(config)
        if config.init_from is not None:
            check_vocabulary(self._data, open_run(config.init_from).metadata, where=config.init_from)
        return self._data

    def model(self, config: ChatConfig, data: "ChatData") -> "CausalModel":
        from whet.recipes.chat.model import build_model

        return build_model(data.arch, vocab_size=data.tokenizer.vocab_size, dropout=config.dropout)

    def loss(self, model: "CausalModel", micro: "DictBatch") -> "tuple[Tensor, Tensor]":
        from whet.recipes.chat.model import next_token_loss

        return next_token_loss(model, micro)

    def outputs(self, model: "CausalModel", micro: "DictBatch") -> "Tensor":
        from whet.recipes.chat.model import model_inputs

        return model.logits(model(*model_inputs(micro))[-1])

    def partial_metrics(self, model: "CausalModel", micro_batches: Iterator["DictBatch"]) -> list[float]:
        from whet.recipes.chat.evaluation import partial_metrics

        return partial_metrics(model, micro_batches)

    def merge_metrics(self, model: "CausalModel", parts: list[list[float]]) -> dict[str, Any]:
        from whet.recipes.chat.evaluation import merge_metrics

        return merge_metrics(model, parts, self._data)

    def metadata(self, config: ChatConfig, data: "ChatData") -> dict[str, Any]:  # noqa: ARG002
        from whet.recipes.chat.responder import responder_metadata

        return {**responder_metadata(data.tokenizer, data.arch), "data": data.fingerprint}

    def explain_changed_data(
        self, error: DataChangedError, config: ChatConfig, versions: Mapping[str, str | None]
    ) -> UsageError:
        # Prepared folders do not change by themselves. The embedded data changes with the versions of whet and Python.
        return error if data_folders(config) else explain_data_change(error, _EMBEDDED, versions)

    def load_generator(self, metadata: dict[str, Any]) -> "Responder":
        """Create a responder from a run's metadata. The caller then loads the weights into its model."""
        from whet.recipes.chat.responder import restore_responder

        return restore_responder(metadata)


def check_vocabulary(data: "ChatData", metadata: dict[str, Any], *, where: str) -> None:
    """Raise UsageError if the weights of `init_from` were not trained with the tokenizer of the data."""
    if metadata.get("tokenizer") != data.tokenizer.to_json():
        raise UsageError(
            f"{where} was trained with a different tokenizer than that of the data",
            got=f"{metadata.get('vocab_size', 'no')} tokens there, {data.tokenizer.vocab_size} in the data",
            try_="whet data chat ... with the tokenizer of the first data",
        )


def recipe() -> ChatRecipe:
    return ChatRecipe()
