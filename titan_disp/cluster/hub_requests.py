"""This module warns before hundreds of ranks send their requests to the Hugging Face hub at once."""

from torchtitan.config import JobConfig

from titan_disp.batch import data_parallel_degree
from titan_disp.data.files import streams_from_hub
from titan_disp.data.hub_dataset import fetch_arguments, is_hub_name, parse_name
from titan_disp.data.sources import DataSet, training_sets

FEW_NODES = 4  # so many nodes may stream without a warning: our choice
GPUS_PER_NODE = 8  # assumed if only the number of ranks is known
C4_FILES = 1024  # files of the training split
# Requests for files in 5 minutes, by Hugging Face's documentation (huggingface.co/docs/hub/rate-limits, "Resolvers").
WITHOUT_TOKEN = 3000  # per IP address, which the nodes of a cluster often share
FREE_ACCOUNT = 5000


def hub_warnings(job_config: JobConfig, ranks: int, nodes: int | None = None) -> list[str]:
    """Return a warning for each training data set that more than a few nodes would stream from the hub.

    Args:
        job_config: config of the run.
        ranks: number of ranks.
        nodes: number of nodes; by default, 8 ranks are assumed per node.
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
    # Every stream reads each file that has its documents (at most files + streams reads), on all of its ranks.
    if named:
        count = f"at least {2 * ranks:,} requests (two per Parquet file and rank)"
    else:
        count = f"{(C4_FILES + streams) * (ranks // streams):,} requests (one per file and rank that reads it)"
    return (
        f"{data.key}.dataset {dataset!r} is streamed from the Hugging Face hub by {ranks:,} ranks on {nodes} nodes. "
        f"Every epoch takes {count}, most of them at once; every resume repeats them, and every broken connection adds "
        f"one. By its documentation, the hub answers {WITHOUT_TOKEN:,} requests in 5 minutes from one address without "
        f"a token, and {FREE_ACCOUNT:,} from a free account. Read a copy: titan-disp data fetch {fetch}, and "
        f"{data.path_key} = DIR"
    )
