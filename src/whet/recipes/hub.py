"""Errors of the Hugging Face Hub in plain words."""

_HUB_ERRORS = (
    ("GatedRepoError", "the hub gives it only to those who were let in"),
    ("RepositoryNotFoundError", "the hub has none of this name, or hides it"),
    ("RevisionNotFoundError", "the hub does not have this revision"),
    ("RemoteEntryNotFoundError", "the hub has it without this file"),
    ("OfflineModeIsEnabled", "HF_HUB_OFFLINE forbids to ask the hub"),
    ("LocalEntryNotFoundError", "the hub cannot be reached"),
    ("ConnectionError", "the hub cannot be reached"),
)
"""The first that fits; by name, since the library need not be here."""


def explain_hub_error(error: BaseException) -> tuple[str, str]:
    """What is wrong, and the last word about it.

    >>> why_not(ConnectionError("Name or service not known"))
    ('the hub cannot be reached', 'Name or service not known')
    """
    chain = [error]
    while (deeper := chain[-1].__cause__ or chain[-1].__context__) is not None and deeper not in chain:
        chain.append(deeper)
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    what = next((words for name, words in _HUB_ERRORS if name in kinds), "the hub did not give it")
    last = chain[-1]
    first = str(last).strip().partition("\n")[0].partition(". ")[0]
    return what, str(getattr(last, "strerror", None) or first or type(last).__name__)[:160]
