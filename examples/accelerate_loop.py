"""Train the models of hf_trainer.py with the dispersion loss in a plain loop with
Hugging Face's Accelerate.

pip install transformers accelerate
python examples/accelerate_loop.py           # or accelerate launch, for several GPUs
"""

import torch
from accelerate import Accelerator
from hf_trainer import Example, build_model, collate, sequences, typed
from torch.utils.data import DataLoader

from titan_disp.dispersion import attach


def train(example: Example) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=example.accumulation)
    torch.manual_seed(0)
    model = build_model(example.model, example.seq_len).train()
    handle = attach(model, coeff=example.coeff)
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.lr)
    loader = DataLoader(
        sequences(example.seq_len), example.batch_size, shuffle=True, collate_fn=collate
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    microbatches = example.steps * example.accumulation
    for microbatch, batch in zip(range(1, microbatches + 1), loader, strict=False):
        with accelerator.accumulate(model):
            ce = model(**batch).loss
            # backward divides the loss by the number of microbatches.
            accelerator.backward(ce + handle.loss())
            optimizer.step()
            optimizer.zero_grad()
        step, remainder = divmod(microbatch, example.accumulation)
        if not remainder and (step == 1 or step % example.every == 0):
            dispersion = torch.stack([*handle.losses.values()]).mean()
            accelerator.print(
                f"step {step:4}  cross-entropy {ce.item():.3f}  dispersion "
                f"{dispersion.item():.4f}"
            )


def main() -> None:
    train(typed(__doc__))


if __name__ == "__main__":
    main()
