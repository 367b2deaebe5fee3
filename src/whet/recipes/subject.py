"""What is verified behind a word: a recipe with its data, or a model with example inputs that a factory gives."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.config.resolve import resolve
from whet.data.batch import Micro, Position
from whet.data.open import open_source
from whet.device.cpu import Cpu
from whet.recipes.learning import optimizer_of
from whet.recipes.recipe import Recipe, as_recipe, is_recipe, load_factory
from whet.verify.answering import fake_mode
from whet.verify.subject import Specimen, Subject, specimen_of


def load_subject(word: str, words: Sequence[str] = (), *, file: Path | None = None, is_causal: bool = False) -> Subject:
    """The recipe, or the model, behind a word; `words` are a recipe's settings."""
    factory = load_factory(word, default=("recipe", "model"))
    if _gives_recipe(factory):
        recipe = as_recipe(factory(), word)
        if is_causal and not hasattr(recipe, "outputs"):
            raise UsageError(
                "this recipe does not say what its model predicts",
                got=f"{word} and --causal",
                try_="a method outputs(self, model, micro) in the recipe; then it is asked without --causal",
            )
        return _of_recipe(recipe, words, file=file)
    if words or file:
        raise UsageError("only a recipe has settings", got=" ".join(words) or str(file), try_=f"{word} alone")
    return Subject(name=word, make=partial(_of_factory, factory, word, is_causal=is_causal))


def _gives_recipe(factory: Callable[[], Any]) -> bool:
    """Whether it makes a recipe, whatever its name; a model is made among fake tensors, which takes no memory."""
    if getattr(factory, "__name__", "") == "recipe":
        return is_recipe(factory())
    try:
        with fake_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return is_recipe(factory())
    except Exception:
        # A model that needs real numbers to be made: whoever asks about it will see why.
        return False


def _of_factory(factory: Callable[[], Any], word: str, *, is_causal: bool) -> Specimen:
    made = factory()
    if not isinstance(made, tuple | list):
        raise UsageError(
            f"what {word} gives cannot be verified",
            got=type(made).__name__,
            try_="return model, (x, y); or a recipe",
        )
    return specimen_of(made, word=word, is_causal=is_causal)


def _of_recipe(recipe: Recipe, words: Sequence[str], *, file: Path | None) -> Subject:
    config = resolve(recipe.Config, words, file=file).config
    workload = recipe.describe(config)
    data = recipe.data(config)

    def micro(size: int) -> Micro:
        source = open_source(data.train, Cpu(), global_batch_size=size, seed=config.seed, is_resident=False)
        batch = next(iter(source.batches(Position())))
        return next(iter(source.micros(batch, micro_batch=size, how="fixed")))

    def make() -> Specimen:
        model = recipe.model(config, data)
        outputs = getattr(recipe, "outputs", None)
        return Specimen(
            model=model,
            loss=partial(recipe.loss, model),
            micro=micro,
            size=config.global_batch_size,
            optimizer=optimizer_of(recipe, config),
            outputs=None if outputs is None else partial(outputs, model),
        )

    return Subject(name=recipe.name, make=make, workload=workload)
