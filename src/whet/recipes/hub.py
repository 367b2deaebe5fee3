"""Readable explanations for errors of the Hugging Face Hub."""

from whet.base.errors import first_line

# The first match is used. Errors are matched by class name, because huggingface_hub may not be installed.
_HUB_ERRORS = (
    ("GatedRepoError", "gated repository: request access first"),
    ("RepositoryNotFoundError", "no such repository on the hub, or it is private"),
    ("RevisionNotFoundError", "the hub does not have this revision"),
    ("RemoteEntryNotFoundError", "the repository does not have this file"),
    ("OfflineModeIsEnabled", "HF_HUB_OFFLINE is set"),
    ("LocalEntryNotFoundError", "the hub cannot be reached"),
    ("ConnectionError", "the hub cannot be reached"),
)


def explain_hub_error(error: BaseException) -> tuple[str, str]:
    """Return the problem as a short phrase, and the message of the original error.

    >>> explain_hub_error(ConnectionError("Name or service not known"))
    ('the hub cannot be reached', 'Name or service not known')
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    what = next((text for name, text in _HUB_ERRORS if name in kinds), "the download from the hub failed")
    last = chain[-1]
    return what, str(getattr(last, "strerror", None) or first_line(last).partition(". ")[0])[:160]
