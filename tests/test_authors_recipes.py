"""The recipes of train_configs/authors against the authors' way to train: transformers'
Trainer with a loss that ignores the number of items in a batch.
"""

import copy

import pytest
import torch

from tests.command_line import ROOT
from tests.pages import loaded

AUTHORS = ROOT / "train_configs" / "authors"
# sequences per microbatch × accumulation steps, from the script or its commands
RECIPES = {
    "midtrain_gpt2_wikitext.toml": (32, 4),
    "midtrain_qwen3_0.6b_wikitext.toml": (1, 32),
}
STEPS = 4


def cross_entropy(logits, labels):
    """As the script's ``CausalLMLoss``."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )


def initial_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def trained_by_the_authors(sequences, config, batch_size, accumulation_steps, folder):
    """The weights after ``STEPS`` steps, and the logged norms of the gradients."""
    from transformers import Trainer, TrainingArguments

    class CustomLossTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            loss = cross_entropy(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

        def _get_train_sampler(self, *_):
            return None

    optimizer = config.optimizer
    trainer = CustomLossTrainer(
        model=initial_model(),
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation_steps,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            max_grad_norm=1.0,  # the script's; eps is the Trainer's default
            optim="adamw_torch",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in sequences],
    )
    trainer.train()
    norms = [
        row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row
    ]
    return trainer.model, norms


def trained_on_means(sequences, config):
    """The weights after steps on the mean over the global batch, as in TorchTitan."""
    model = initial_model()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-2,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=0.0,
    )
    for batch in sequences.split(config.training.global_batch_size):
        cross_entropy(model(batch).logits, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", RECIPES)
def test_clipping_is_that_of_the_authors_sums(name, tmp_path):
    """Their gradients are sums over the accumulation steps: the Trainer divides a loss
    only if the model cannot divide it by the number of items.
    """
    batch_size, accumulation_steps = RECIPES[name]
    config = copy.deepcopy(loaded(AUTHORS / name))
    assert config.training.global_batch_size == batch_size * accumulation_steps
    torch.manual_seed(1)
    count = STEPS * config.training.global_batch_size
    # Later sequences are easier, so that the norm falls below the limit.
    sequences = torch.stack(
        [torch.randint(0, 64 - 60 * i // count, (8,)) for i in range(count)]
    )
    theirs, norms = trained_by_the_authors(
        sequences, config, batch_size, accumulation_steps, tmp_path
    )
    assert max(norms) > 1
    ours = trained_on_means(sequences, config)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=2e-5, rtol=1e-4)
