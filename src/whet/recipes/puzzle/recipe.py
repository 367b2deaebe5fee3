"""The puzzle recipe: train a tiny recursive model on Sudokus or the puzzles of a folder. Imports torch lazily."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError
from whet.plan.workload import Workload
from whet.recipes.puzzle import config as puzzle_config
from whet.recipes.puzzle.config import PuzzleConfig, Sizes
from whet.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from whet.data.batch import DictBatch
    from whet.recipes.puzzle.arc import ArcTasks
    from whet.recipes.puzzle.data import PuzzleData
    from whet.recipes.puzzle.model import PuzzleModel
    from whet.step.optimizers import OptimizerChoice

Predictor = Callable[[Sequence[str]], list[dict[str, Any]]]


class PuzzleRecipe(Recipe):
    """Trains a model to solve puzzles: by default 4x4 Sudokus, with 88 of the 288 grids held out."""

    name = "puzzle"
    single_process_reason = "each place of the batch keeps its puzzle from step to step in the memory of one process"
    Config = PuzzleConfig
    goal = "exact_accuracy"
    _arc: "ArcTasks | None" = None
    """ARC tasks of the data that was loaded last, whose augmented copies vote. None for other puzzles."""

    def describe(self, config: PuzzleConfig, data: "PuzzleData | None" = None) -> Workload:
        if data is None:
            return puzzle_config.describe(config)
        return puzzle_config.describe(config, data.sizes, len(data.train["inputs"]))

    def data(self, config: PuzzleConfig) -> "PuzzleData":
        from whet.recipes.puzzle.data import read_data

        data = read_data(config)
        self._arc = data.arc
        return data

    def model(self, config: PuzzleConfig, data: "PuzzleData") -> "PuzzleModel":
        return make_model(config, data.sizes, num_slots=config.global_batch_size)

    def optimizer(self, config: PuzzleConfig) -> "OptimizerChoice":
        from whet.step.optimizers import OptimizerChoice

        return OptimizerChoice(
            name=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            table_lr=config.puzzle_emb_lr,
            table_weight_decay=config.puzzle_emb_weight_decay,
        )

    def loss(self, model: "PuzzleModel", micro: "DictBatch") -> "Tensor":
        from whet.recipes.puzzle.model import puzzle_loss

        return puzzle_loss(model, micro)

    def evaluate(self, model: "PuzzleModel", micro_batches: Iterator["DictBatch"]) -> dict[str, Any]:
        from whet.recipes.puzzle.evaluation import evaluate

        return evaluate(model, micro_batches, self._arc)

    def metadata(self, config: PuzzleConfig, data: "PuzzleData") -> dict[str, Any]:  # noqa: ARG002
        return {**data.sizes.model_dump(), "is_sudoku": data.is_sudoku}

    def example_input(self, metadata: dict[str, Any]) -> str | None:
        """Return an example input for `whet predict`: a Sudoku with one digit. None for other puzzles."""
        return f"{1:.<{Sizes.model_validate(metadata).length}}" if metadata["is_sudoku"] else None

    def predict(self, config: PuzzleConfig, metadata: dict[str, Any]) -> "tuple[PuzzleModel, Predictor]":
        """Return a model without trained weights, and a function that solves Sudokus given as lines of text."""
        if not metadata["is_sudoku"]:
            raise UsageError("only Sudokus can be written in a line", got="a run on arrays", try_="a run on Sudokus")
        sizes = Sizes.model_validate(metadata)
        model = make_model(config, sizes, num_slots=1)

        def predictor(texts: Sequence[str]) -> list[dict[str, Any]]:
            from whet.recipes.puzzle.evaluation import solve_texts

            return solve_texts(model, texts, sizes)

        return model, predictor


def make_model(config: PuzzleConfig, sizes: Sizes, *, num_slots: int) -> "PuzzleModel":
    """Create a model with initial weights."""
    from whet.recipes.puzzle.model import PuzzleModel

    return PuzzleModel(config.arch, sizes, num_slots=num_slots, seed=config.seed)


def recipe() -> PuzzleRecipe:
    return PuzzleRecipe()
