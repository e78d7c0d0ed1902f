"""This is Qwen3 with a forward that can return intermediate activations, and its parallelization."""

from titan_disp.models.entry import ModelEntry
from titan_disp.qwen3.flavors import flavors
from titan_disp.qwen3.hf import Qwen3HfAdapter
from titan_disp.qwen3.model import Qwen3DispModel
from titan_disp.qwen3.parallelize import parallelize

ENTRY = ModelEntry(
    name="qwen3_disp",
    title="Qwen3",
    flavors=flavors,
    model_cls=Qwen3DispModel,
    parallelize=parallelize,
    adapter=Qwen3HfAdapter,
)
