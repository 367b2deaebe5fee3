"""The text recipe: which class a text belongs to."""

from whet.plan.workload import Workload
from whet.recipes.text import config as text_config
from whet.recipes.text.config import TextConfig


class TextRecipe:
    """Classifies texts; by default the docstrings of installed libraries by library."""

    name = "text"
    Config = TextConfig

    def describe(self, config: TextConfig) -> Workload:
        return text_config.describe(config)


def recipe() -> TextRecipe:
    return TextRecipe()
