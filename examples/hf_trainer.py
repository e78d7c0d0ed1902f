"""Train a tiny, randomly initialised Qwen3 or GPT-2 with the dispersion loss in Hugging Face's Trainer, on pydoc's texts.

    pip install 'titan-disp[examples]'           # accelerate, which Trainer needs
    python examples/hf_trainer.py                # Qwen3 with padded batches of unequal sequences, 2 microbatches per step
    python examples/hf_trainer.py --model gpt2 --coeff 0.2

Copy ``DispersionTrainer`` into your own code. With several GPUs, start one process for each (torchrun or accelerate
launch).
"""

import argparse
import tempfile
from collections.abc import Sequence
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

from titan_disp.dispersion import dispersion_losses

PAD, VOCABULARY = 256, 257  # after the bytes
IGNORED = -100  # the label of positions that the cross-entropy ignores


class DispersionTrainer(Trainer):
    """A Trainer that minimises cross-entropy + λ · dispersion in training, and measures cross-entropy alone in evaluation.

    Args:
        coeff: λ.
        options: options of ``titan_disp.dispersion.DispersionLoss``, such as variant or estimator.
    """

    def __init__(self, *args: Any, coeff: float = 0.1, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.coeff, self.options = coeff, options or {}
        self.sums: list[Tensor] = []  # since the last log: [dispersion summed over labels, number of labels]

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ce, outputs = super().compute_loss(model, {**inputs, "output_hidden_states": True}, True, num_items_in_batch)
        # A model of L blocks returns L + 1 hidden states:
        #   [0]         the embedding, which no block has changed. Tokens condense with depth, so it is left out.
        #   [1 … L-1]   the outputs of all blocks but the last.
        #   [L]         the last block's output *after the final norm*. Its value before the norm is not returned.
        # The paper's authors take [1:] when they start from published weights (mid-training). For pre-training, they
        # and the model qwen3_disp take the outputs of all blocks before the norm: [1:-1], and the last one by a forward
        # hook.
        layers = outputs.hidden_states[1:]
        # Without the mask, padding would be dispersed as if it were text.
        losses = dispersion_losses(
            layers, valid=inputs["attention_mask"].bool(), step=self.state.global_step, **self.options
        )
        per_sequence = losses.mean(0)  # [layers, B] → [B]
        # num_items_in_batch is the number of labels of the whole step, over all microbatches and ranks. The
        # cross-entropy is a sum over this microbatch, divided by that number, and Trainer adds up the microbatches.
        # Dispersion needs the same scale, or it would be multiplied by the number of microbatches. So every sequence is
        # weighted by its number of labels.
        labels = (inputs["labels"][:, 1:] != IGNORED).sum(1)
        dispersion = (per_sequence * labels).sum()
        if num_items_in_batch is None:
            # The model's loss is a mean, which Trainer divides by the number of microbatches.
            scale = 1 / labels.sum()
        else:
            # Gradients are averaged over the ranks, so Trainer multiplies the cross-entropy by their number.
            ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            scale = ranks / num_items_in_batch
        self.sums.append(torch.stack([dispersion.detach(), labels.sum()]))
        loss = ce + self.coeff * dispersion * scale
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Also log the dispersion of this rank's sequences, without λ."""
        if "loss" in logs and self.sums:
            dispersion, labels = torch.stack(self.sums).sum(0).tolist()
            logs["dispersion"] = dispersion / labels
            self.sums.clear()
        super().log(logs, *args, **kwargs)


class Example(NamedTuple):
    """The settings of ``build_trainer``, small enough to train in seconds on a CPU."""

    model: str = "qwen3"
    coeff: float = 0.1
    steps: int = 60
    batch_size: int = 4
    accumulation: int = 2
    seq_len: int = 96
    lr: float = 3e-3
    every: int = 10


def build_model(name: str, seq_len: int) -> PreTrainedModel:
    if name == "gpt2":
        shape: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": seq_len}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
        config = GPT2Config(vocab_size=VOCABULARY, use_cache=False, **shape, **dropout, **ids)
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # transformers expects these words in the name of the class
        return model
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "max_position_embeddings": seq_len}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ids = {"pad_token_id": PAD, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, use_cache=False, **shape, **heads, **ids))


def sequences(seq_len: int) -> list[list[int]]:
    """Return paragraphs as bytes; they have unequal lengths, like documents."""
    paragraphs = (text for topic in topics.values() for text in topic.split("\n\n"))
    return [list(text.encode()[:seq_len]) for text in paragraphs if len(text) > 16]


def collate(batch: Sequence[list[int]]) -> dict[str, Tensor]:
    """Pad sequences on the right to the longest one."""
    tokens = [torch.tensor(sequence) for sequence in batch]
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD)
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
        coeff=example.coeff,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in Example()._asdict().items():
        choices = ("qwen3", "gpt2") if name == "model" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, choices=choices)
    with tempfile.TemporaryDirectory() as folder:
        build_trainer(Example(**vars(parser.parse_args())), folder).train()  # prints its logs


if __name__ == "__main__":
    main()
