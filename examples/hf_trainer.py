"""Train a tiny, randomly initialised Qwen3 or GPT-2 with the dispersion loss in Hugging
Face's Trainer, on pydoc's texts.

    pip install transformers accelerate
    python examples/hf_trainer.py                # Qwen3 with padded batches of unequal sequences, 2 microbatches per step
    python examples/hf_trainer.py --model gpt2 --coeff 0.2

Copy ``DispersionTrainer`` into your own code. With several GPUs, start one process for
each (torchrun or accelerate launch).
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import chain
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from titan_disp.dispersion import attach

PAD = 256  # the token ids 0 to 255 are bytes
VOCABULARY = 257
IGNORED = -100  # the label of positions that the cross-entropy ignores


class DispersionTrainer(Trainer):
    """A Trainer that minimises cross-entropy + λ · dispersion in training. In evaluation,
    the loss is the cross-entropy.

    Args:
        dispersion: arguments of ``titan_disp.dispersion.attach``, such as coeff (λ),
            layers or variant.
    """

    def __init__(
        self, *args: Any, dispersion: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.handle = attach(self.model, **(dispersion or {}))

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        # num_items_in_batch is the number of labels of the whole step, over all
        # microbatches and ranks. The cross-entropy is a sum over this microbatch,
        # divided by that number, and Trainer adds up the microbatches. Dispersion needs
        # the same scale: otherwise, it would be multiplied by the number of microbatches.
        # So each sequence is weighted by its number of labels.
        labels = (inputs["labels"][:, 1:] != IGNORED).sum(1)
        if num_items_in_batch is None:
            # The model's loss is a mean, which Trainer divides by the number of
            # microbatches.
            weights = labels / labels.sum()
        else:
            # Gradients are averaged over the ranks, so Trainer multiplies the
            # cross-entropy by the number of ranks.
            ranks = 1
            if self.args.average_tokens_across_devices:
                ranks = self.accelerator.num_processes
            weights = labels * ranks / num_items_in_batch
        ce, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.handle.step = self.state.global_step
        loss = ce + self.handle.loss(weights)  # 0 in evaluation
        if return_outputs:
            return loss, outputs
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log also the dispersion of this rank's last microbatch, without λ."""
        if "loss" in logs:
            logs["dispersion"] = (
                torch.stack([*self.handle.losses.values()]).mean().item()
            )
        super().log(logs, *args, **kwargs)


class Example(NamedTuple):
    """The settings of this example and of accelerate_loop.py, small enough to train in
    seconds on a CPU.
    """

    model: str = "qwen3"
    coeff: float = 0.1
    steps: int = 60
    batch_size: int = 4
    accumulation: int = 2
    seq_len: int = 96
    lr: float = 3e-3
    every: int = 10  # steps between two lines of output


def build_model(name: str, seq_len: int) -> PreTrainedModel:
    """Return a small model with random weights. ``name`` is "qwen3" or "gpt2"."""
    if name == "gpt2":
        shape: dict[str, Any] = {
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": seq_len,
        }
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
        config = GPT2Config(
            vocab_size=VOCABULARY, use_cache=False, **shape, **dropout, **ids
        )
        model = GPT2LMHeadModel(config)
        # transformers looks for these words in the name of the class.
        model.loss_type = "ForCausalLM"
        return model
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "max_position_embeddings": seq_len,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ids = {"pad_token_id": PAD, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, use_cache=False, **shape, **heads, **ids)
    )


def sequences(seq_len: int) -> list[list[int]]:
    """Return pydoc's paragraphs as bytes. They have unequal lengths, like documents."""
    paragraphs = chain.from_iterable(text.split("\n\n") for text in topics.values())
    return [list(text.encode()[:seq_len]) for text in paragraphs if len(text) > 16]


def collate(batch: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return a batch in which all sequences are padded on the right to the longest."""
    tokens = [torch.tensor(sequence) for sequence in batch]
    input_ids = torch.nn.utils.rnn.pad_sequence(
        tokens, batch_first=True, padding_value=PAD
    )
    mask = input_ids != PAD
    return {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": input_ids.masked_fill(~mask, IGNORED),
    }


def build_trainer(example: Example, folder: str) -> DispersionTrainer:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=example.steps,
        per_device_train_batch_size=example.batch_size,
        gradient_accumulation_steps=example.accumulation,
        learning_rate=example.lr,
        logging_steps=example.every,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    return DispersionTrainer(
        build_model(example.model, example.seq_len),
        arguments,
        train_dataset=sequences(example.seq_len),
        data_collator=collate,
        dispersion={"coeff": example.coeff},
    )


def typed(description: str | None) -> Example:
    """Return the settings on the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in Example()._asdict().items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            choices=("qwen3", "gpt2") if name == "model" else None,
        )
    return Example(**vars(parser.parse_args()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build_trainer(typed(__doc__), folder).train()  # prints its logs


if __name__ == "__main__":
    main()
