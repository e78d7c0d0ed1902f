"""This is GPT-2: learned positions, LayerNorm, GELU, biases and tied embeddings, without dropout."""

from titan_disp.gpt2.flavors import flavors
from titan_disp.gpt2.hf import GPT2HfAdapter
from titan_disp.gpt2.model import GPT2DispModel
from titan_disp.gpt2.parallelize import parallelize
from titan_disp.models.entry import ModelEntry

ENTRY = ModelEntry(
    name="gpt2_disp",
    title="GPT-2",
    flavors=flavors,
    model_cls=GPT2DispModel,
    parallelize=parallelize,
    adapter=GPT2HfAdapter,
)
