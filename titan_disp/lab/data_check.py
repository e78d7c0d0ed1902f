"""``titan-disp data check`` reads all files of a run's data, and reports what a start of
the run would find in them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from titan_disp.cluster.plan import Resume, resumes
from titan_disp.config.types import JobConfig
from titan_disp.data import ledger
from titan_disp.data.formats import suffix_of
from titan_disp.data.ledger import Entry
from titan_disp.data.options import stream_options
from titan_disp.data.sources import Reading, checked_data, data_sets, readings
from titan_disp.data.tokenizer import AnyTokenizer, load_tokenizer
from titan_disp.data.tokenizer_check import tokenizer_warnings
from titan_disp.errors import ConfigError, counted
from titan_disp.text import byte_size


@dataclass(frozen=True)
class DataCheck:
    """What a run finds in its data.

    Attributes:
        formats: number of files by suffix.
        stored: bytes of all files.
        text: estimated bytes of text in these files.
        separator: the token that ends documents, or "none".
        ledger: how many bytes of each file are used, skipped or left out, and why.
        readings: how ranks read each source.
        resume: by source, how much a resume in the middle of an epoch reads again.
        copies: pairs of files with the same content.
        warnings: warnings that a start prints about the tokenizer and the readings.
        refused: the reason why a start would refuse the data, or "".
    """

    formats: dict[str, int]
    stored: int
    text: float
    separator: str
    ledger: list[Entry]
    readings: list[Reading]
    resume: dict[str, Resume]
    copies: list[tuple[str, str]]
    warnings: list[str]
    refused: str

    def page(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        formats = ", ".join(
            f"{count:,} *{suffix}" for suffix, count in self.formats.items()
        )
        yield f"files      {formats}: {byte_size(self.stored)} stored"
        yield f"text       about {byte_size(self.text, 3)}"
        yield f"separator  {self.separator}"
        yield from ledger.lines(self.ledger)
        for reading in self.readings:
            source = reading.source or "reading"
            yield (
                f"{source:<10} {counted(reading.ranks, 'rank')}: in an epoch, a rank "
                f"reads up to {byte_size(reading.largest, 3)}, and all ranks "
                f"{reading.amplification:.2f} times what is stored; the run reads the "
                f"text about {reading.epochs:.2g} times"
            )
        for source, resume in self.resume.items():
            yield (
                f"{f'resume {source}':<10} at 50 % of an epoch, a rank reads up to "
                f"{byte_size(resume.rank_bytes, 3)} again, and all ranks "
                f"{byte_size(resume.total_bytes, 3)}: about {resume.seconds:.2g} s"
            )
        for first, second in self.copies:
            yield f"copy       {second} of {first}"
        for warning in self.warnings:
            yield f"warning    {warning}"
        verdict = "a start accepts the data"
        if self.refused:
            verdict = f"a start refuses the data: {self.refused}"
        yield f"verdict    {verdict}"


def _eos(tokenizer: AnyTokenizer) -> str:
    """Return the text of the tokenizer's EOS token, or "none" if there is none."""
    if tokenizer.eos_id is None:
        return "none"
    return str(tokenizer.id_to_token(tokenizer.eos_id))


def check_data(job_config: JobConfig, ranks: int) -> DataCheck:
    """Return what a run on ``ranks`` data-parallel ranks finds in its data.

    Data that a start would refuse is described in the result, too. Raises ConfigError
    if there is no data, or the data cannot be listed.
    """
    data = data_sets(job_config)
    separator = job_config.stream.separator
    tokenizer = load_tokenizer(job_config.model.hf_assets_path, separator)
    strict = stream_options(job_config, tokenizer=tokenizer)
    warnings: list[str] = []
    refused = ""
    try:
        checked = checked_data(data, strict)
    except ConfigError as error:
        refused = str(error)
        lenient = replace(strict, max_skipped_fraction=1.0, on_bad_data="skip")
        checked = checked_data(data, lenient)
    files = checked.files
    try:
        warnings += tokenizer_warnings(tokenizer, files, strict)
    except ConfigError as error:
        refused = refused or str(error)
    costs = readings(checked.of_sources, job_config, ranks)
    for cost in costs:
        warnings += cost.warnings()
    return DataCheck(
        formats=dict(Counter(suffix_of(file.name) for file in files)),
        stored=sum(file.size for file in files),
        text=sum(file.size * file.density for file in files),
        separator=separator or _eos(tokenizer),
        ledger=checked.ledger,
        readings=costs,
        resume=resumes(checked.of_sources, job_config, ranks),
        copies=[(original.url, copy.url) for original, copy in checked.copies],
        warnings=warnings,
        refused=refused,
    )
