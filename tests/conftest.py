import os
from pathlib import Path

# Small models: threads of several ranks on the same cores cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import titan_disp.plugin  # noqa: E402, F401 — the model's spec, and TorchTitan's device type
from titan_disp.data.sample import documents, write_sample  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, for collective calls without a second process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """The sample corpus with its SentencePiece tokenizer; SAMPLE names a folder that holds it already."""
    if written := os.environ.get("SAMPLE"):
        return Path(written)
    folder = tmp_path_factory.mktemp("data") / "sample"
    write_sample(folder)
    return folder


@pytest.fixture(scope="session")
def hf_tokenizer(tmp_path_factory):
    """A Hugging Face tokenizer folder of 2048 tokens trained on the sample's texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([d["text"] for d in documents()[:500]], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder
