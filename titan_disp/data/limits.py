"""This module decides how many documents and files may be skipped before a run stops.

The counts are those of all ranks together. All ranks therefore decide alike, and so does any other number of ranks.
"""

from titan_disp.errors import DataError

_FIRST = 1000  # documents; among fewer, a few bad ones are a large fraction
_FEW = 10  # damaged files per epoch; with fewer, a small data set may still be worth a run


def check_documents(skipped: float, used: float, allowed: float) -> None:
    """Stop the run if too many documents cannot be used.

    Args:
        skipped: documents skipped so far.
        used: documents used so far.
        allowed: ``stream.max_skipped_fraction``.

    Raises:
        DataError: a larger fraction was skipped; never among the first 1000 documents.
    """
    every = skipped + used
    if every >= _FIRST and skipped > allowed * every:
        raise DataError(
            f"{skipped:.0f} of {every:.0f} documents could not be used, more than stream.max_skipped_fraction "
            f"{allowed} allows: the reasons are in the logs above (of all ranks)"
        )


def check_files(skipped: float, begun: float, files: int, allowed: float) -> None:
    """Stop the run if too many files are damaged and end early.

    Args:
        skipped: damaged files so far, counted again in every epoch.
        begun: files begun so far, counted again in every epoch.
        files: number of files of the data.
        allowed: ``stream.max_skipped_fraction``.

    Raises:
        DataError: a larger fraction of the files is damaged, and at least 10 files per epoch are.
    """
    # Per epoch: otherwise one damaged file among a few would stop a run in its tenth epoch, and again after every
    # resume.
    if skipped * files >= _FEW * begun and skipped > allowed * begun:
        raise DataError(
            f"{skipped:.0f} of {begun:.0f} files are damaged and end early, more than stream.max_skipped_fraction "
            f"{allowed} allows: their names are in the logs above (of all ranks)"
        )
