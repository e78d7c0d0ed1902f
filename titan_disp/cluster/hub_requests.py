"""What a run that streams from the hub asks of it, before hundreds of ranks ask it at once."""

from torchtitan.config import JobConfig

from titan_disp.batch import data_parallel_degree
from titan_disp.data.files import streams_from_hub
from titan_disp.data.hub_dataset import fetch_arguments, is_hub_name, parse_name
from titan_disp.data.sources import DataSet, training_sets

FEW_NODES = 4  # that may stream without a warning: our choice
GPUS_PER_NODE = 8  # where only the number of ranks is known
C4_FILES = 1024  # of the training split
# Requests for files in 5 minutes: Hugging Face's documentation (huggingface.co/docs/hub/rate-limits, "Resolvers").
WITHOUT_TOKEN = 3000  # per address, which the nodes of a cluster often share
FREE_ACCOUNT = 5000


def hub_warnings(job_config: JobConfig, ranks: int, nodes: int | None = None) -> list[str]:
    """A warning for each data set that more than a few nodes stream from the hub to train on.

    Args:
        nodes: default: as many as hold the ranks at 8 each.
    """
    nodes = nodes or -(-ranks // GPUS_PER_NODE)
    if nodes <= FEW_NODES:
        return []
    streamed = [data for data in training_sets(job_config) if streams_from_hub(data.dataset, data.path)]
    return [_warning(job_config, data, ranks, nodes) for data in streamed]


def _warning(job_config: JobConfig, data: DataSet, ranks: int, nodes: int) -> str:
    dataset = data.dataset
    named = is_hub_name(dataset)
    fetch = fetch_arguments(parse_name(dataset, f"{data.key}.dataset")) if named else "DIR"
    streams = data_parallel_degree(job_config, ranks)
    # A file is read by every stream that has documents of it (at most files + streams reads), and by all ranks of the stream.
    if named:
        count = f"at least {2 * ranks:,} requests (two for a Parquet file and rank)"
    else:
        count = f"{(C4_FILES + streams) * (ranks // streams):,} requests (one for a file and rank that reads it)"
    return (
        f"{data.key}.dataset {dataset!r} is streamed from the Hugging Face hub by {ranks:,} ranks on {nodes} nodes: {count} in "
        "every epoch, most of them at once, and again after every resume, and one more wherever a connection breaks. The hub "
        f"answers {WITHOUT_TOKEN:,} in 5 minutes without a token, from one address, and {FREE_ACCOUNT:,} of a free account (its "
        f"documentation). Read a copy: titan-disp data fetch {fetch}, and {data.path_key} = DIR"
    )
