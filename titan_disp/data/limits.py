"""When data is broken rather than blemished: how much of it may be skipped before a run stops.

All ranks come to one verdict, and any number of ranks to the same one: counts are those of all ranks together.
"""

from titan_disp.errors import DataError

_FIRST = 1000  # documents: of fewer, a few bad ones are a large part
_FEW = 10  # damaged files of an epoch, with fewer of which a small data set may still live


def check_documents(skipped: float, used: float, allowed: float) -> None:
    """Stop where too many documents could not be used.

    Args:
        skipped, used: documents so far. allowed: stream.max_skipped_fraction.

    Raises:
        DataError: more than ``allowed`` of them, after the first 1000.
    """
    every = skipped + used
    if every >= _FIRST and skipped > allowed * every:
        raise DataError(
            f"{skipped:.0f} of {every:.0f} documents could not be used, more than stream.max_skipped_fraction {allowed} allows: "
            "the reasons are in the logs above (of all ranks)"
        )


def check_files(skipped: float, begun: float, files: int, allowed: float) -> None:
    """Stop where too many files are damaged and end early.

    Args:
        skipped, begun: files so far, again in every epoch. files: of the data. allowed: stream.max_skipped_fraction.

    Raises:
        DataError: more than ``allowed`` of those that were begun, and 10 at least in an epoch.
    """
    # In an epoch: one damaged file among a few would stop a run in its tenth epoch otherwise, and every resume after it.
    if skipped * files >= _FEW * begun and skipped > allowed * begun:
        raise DataError(
            f"{skipped:.0f} of {begun:.0f} files are damaged and end early, more than stream.max_skipped_fraction {allowed} "
            "allows: their names are in the logs above (of all ranks)"
        )
