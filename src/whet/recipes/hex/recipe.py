"""The Hex recipe: where to play, and who will win. torch is imported when it is needed, so that a plan needs none."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from whet.plan.workload import Workload
from whet.recipes.hex import config as hex_config
from whet.recipes.hex.architecture import PRESETS
from whet.recipes.hex.config import HexConfig
from whet.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from whet.config.resolve import ResolvedConfig
    from whet.data.batch import MicroBatch
    from whet.recipes.hex.arena import Contest
    from whet.recipes.hex.data import HexData
    from whet.recipes.hex.model import HexNet, LossWeights


class HexRecipe(Recipe):
    """Learns from games; by default from those of the two-distance player."""

    name = "hex"
    Config = HexConfig
    goal = "policy_top1"
    presets: ClassVar = {str(name): {"arch.preset": name} for name in PRESETS}
    _weights: "LossWeights | None" = None

    def describe(self, config: HexConfig, data: "HexData | None" = None) -> Workload:
        hex_config.check_data_path(config)
        if data is not None:
            return hex_config.describe_hex(config, size=data.size, num_samples=len(data.train["move"]))
        if config.data is None:
            return hex_config.describe_hex(config)
        from whet.recipes.hex.game.positions import SPLITS, read_manifest

        told = read_manifest(Path(config.data))
        hex_config.check_board_size(config, told.size)
        hex_config.check_splits(*(told.splits[name].positions for name in SPLITS))
        num_samples = told.splits["train"].positions * (2 if config.augment else 1)
        return hex_config.describe_hex(config, size=told.size, num_samples=num_samples)

    def data(self, config: HexConfig) -> "HexData":
        from whet.recipes.hex.data import read_data

        return read_data(config)

    def model(self, config: HexConfig, data: "HexData") -> "HexNet":  # noqa: ARG002
        from whet.recipes.hex.model import HexNet, LossWeights

        self._weights = LossWeights(
            policy=config.policy_weight, value=config.value_weight, uncertainty=config.uncertainty_weight
        )
        return HexNet(config.arch, dropout=config.dropout)

    def loss(self, model: "HexNet", micro: "MicroBatch") -> "Tensor":
        from whet.recipes.hex.model import LossWeights, hex_loss

        return hex_loss(model(micro.board), micro, self._weights or LossWeights())

    def evaluate(self, model: "HexNet", micro_batches: Iterator["MicroBatch"]) -> dict[str, Any]:
        from whet.recipes.hex.evaluation import evaluate

        return evaluate(model, micro_batches)

    def tally(self, model: "HexNet", micro_batches: Iterator["MicroBatch"]) -> dict[str, Any]:
        from whet.recipes.hex.evaluation import tally

        return tally(model, micro_batches)

    def conclude(self, model: "HexNet", tallies: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        from whet.recipes.hex.evaluation import conclude

        return conclude(tallies)

    def metadata(self, config: HexConfig, data: "HexData") -> dict[str, Any]:
        return {"size": data.size, "data": data.fingerprint, "arch": config.arch.model_dump(mode="json")}

    def hold_contest(self, one: str, two: str, **how: Any) -> "Contest":
        """Two players meet: see `whet.recipes.hex.arena`."""
        from whet.recipes.hex.arena import hold_contest

        return hold_contest(one, two, **how)

    def improve(self, resolved: "ResolvedConfig[HexConfig]", **how: Any) -> int:
        """A self-play: see `whet.recipes.hex.self_play`; the exit code."""
        from whet.recipes.hex.self_play import SelfPlay

        return SelfPlay(resolved=resolved, **how).run()


def recipe() -> HexRecipe:
    return HexRecipe()
