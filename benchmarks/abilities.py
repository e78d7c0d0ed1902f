"""Secondary outcomes of experiment B in docs/preregistration.md: how well the models of a
sweep predict the next token of new text, and how well they find the other half of a
document.

    python -m benchmarks.abilities train_configs/sweeps/condensing.toml data/evidence/test VALUES.csv

Runs that have not finished are left out. VALUES.csv has the columns of the file that
``titan-disp sweep table`` writes, and ``benchmarks.preregistered`` reads it.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn.functional import linear, normalize
from tyro.conf import Positional

from titan_disp.errors import ConfigError
from titan_disp.lab.inspection.targets import Encode, LoadedModel, find_targets
from titan_disp.lab.inspection.texts import read_texts
from titan_disp.lab.sweeps.comparison import VALUE_COLUMNS, Member, value_row
from titan_disp.lab.sweeps.definition import points, read_sweep
from titan_disp.lab.sweeps.preparation import state
from titan_disp.text import csv_text

BATCH = 32  # sequences
HALF = 128  # tokens; the models are trained on sequences of 256
SEED = 0  # determines the order of the documents


def main(
    sweep: Positional[Path],
    dataset: Positional[str],
    out: Positional[Path],
    documents: int = 512,
) -> None:
    """Write the outcomes of the runs that have finished, and print the other runs.

    Args:
        sweep: file of a sweep.
        dataset: folder of text that no run was trained on.
        out: CSV file to write.
        documents: number of documents to use. Those of fewer than 256 tokens are skipped.
    """
    texts = read_texts(text=None, dataset=dataset, seed=SEED)
    rows = []
    for run in points(read_sweep(sweep)):
        word, detail = state(run.folder)
        if word != "finished":
            print(f"{run.name} is left out: {word}: {detail}")
            continue
        [target] = find_targets(
            [str(run.folder)], all_steps=False, tokenizer=None
        ).values()
        halves = read_halves(texts, target.encode, documents)
        outcomes = abilities(target.load(torch.device("cpu"), "float32"), halves)
        print(run.name, *(f"{name} {value:.4f}" for name, value in outcomes.items()))
        seeds = tuple(sorted(run.seeds.items()))
        rows += [
            value_row(Member(run.name, seeds, value), run.condition, metric)
            for metric, value in outcomes.items()
        ]
    out.write_text(csv_text([VALUE_COLUMNS, *rows]))


def read_halves(texts: Sequence[str], encode: Encode, documents: int) -> Tensor:
    """Return token ids [2, documents, HALF] int64: the first HALF tokens of the documents
    that are long enough, and the next HALF tokens.

    Raises ConfigError if there are fewer such documents.
    """
    beginnings = (encode(text)[: 2 * HALF] for text in texts)
    long_enough = (ids for ids in beginnings if len(ids) == 2 * HALF)
    chosen = list(islice(long_enough, documents))
    if len(chosen) < documents:
        raise ConfigError(
            f"the text has {len(chosen)} documents of {2 * HALF} tokens or more, "
            f"expected {documents}"
        )
    return torch.tensor(chosen).view(documents, 2, HALF).transpose(0, 1)


@torch.no_grad()
def abilities(model: LoadedModel, halves: Tensor) -> dict[str, float]:
    """Return the outcomes of a model, each between 0 and 1, on [2, documents, N] ids.

    next_token_accuracy is the fraction of tokens that the model ranks first, given the
    earlier tokens of the half. retrieval is the fraction of first halves whose nearest
    second half is of the same document. Halves are compared by the cosine of the mean output
    of the final norm. retrieval_centered first subtracts the mean over all halves.
    """
    means = []
    right = 0
    sequences = halves.flatten(0, 1)
    for tokens in sequences.split(BATCH):
        h = model.forward(tokens)
        # The forward pass of a run's model returns the output of the final norm.
        guesses = linear(h[:, :-1], model.head.weight, model.head.bias).argmax(-1)
        right += int((guesses == tokens[:, 1:]).sum())
        means.append(h.double().mean(1))
    pooled = torch.cat(means).view(2, halves.shape[1], -1)
    return {
        "next_token_accuracy": right / sequences[:, 1:].numel(),
        "retrieval": retrieval(pooled),
        "retrieval_centered": retrieval(pooled - pooled.mean((0, 1))),
    }


def retrieval(pooled: Tensor) -> float:
    """Return the fraction of documents whose second half is nearest to the first one, by
    cosine, given [2, documents, F].
    """
    first, second = normalize(pooled, dim=-1)
    nearest = (first @ second.T).argmax(1)
    return float((nearest == torch.arange(len(nearest))).double().mean())


if __name__ == "__main__":
    tyro.cli(main)
