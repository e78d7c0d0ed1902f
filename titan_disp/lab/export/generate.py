"""A saved or exported model generates text on a CPU."""

import sys
from pathlib import Path
from typing import Any

import torch

from titan_disp.config.command_options import GenerateOptions, check_least
from titan_disp.data.tokenizer import AnyTokenizer, load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import hf_weights
from titan_disp.lab.export.saved import find_saved, load_causal_lm, longest_sequence
from titan_disp.run.checkpoint import hf_config
from titan_disp.run.reader import is_run


def _load(
    target: str | Path, tokenizer: str | Path | None
) -> tuple[Any, AnyTokenizer, int]:
    """Return a transformers model, its tokenizer, and the largest number of tokens
    that a sequence may have.

    ``tokenizer`` is a folder that replaces the model's own tokenizer.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    if (Path(target) / "config.json").is_file() and not is_run(target):
        model = load_causal_lm(target)
        longest = longest_sequence(model.config) or sys.maxsize
        return model, load_tokenizer(tokenizer or target), longest
    saved = find_saved(target)
    loaded = saved.tokenizer(tokenizer)
    adapter = saved.adapter()
    model_class = getattr(transformers, adapter.transformers_class)
    config = model_class.config_class(**hf_config(adapter, loaded, "float32"))
    model = model_class.from_pretrained(
        None, config=config, state_dict=hf_weights(saved)
    )
    longest = adapter.model_args.max_seq_len
    return model, loaded, longest


def generate(options: GenerateOptions) -> str:
    """Return the prompt with its continuation, as text.

    The continuation ends with EOS, after ``max_new_tokens``, or at the sequence length
    of training. Raises ConfigError if the prompt leaves no room for more.
    """
    from transformers import GenerationConfig

    check_least(options, max_new_tokens=1, temperature=0, top_k=0)
    model, loaded, longest = _load(options.target, options.tokenizer)
    ids = loaded.plain(options.prompt)
    if loaded.bos_id is not None:
        ids = [loaded.bos_id, *ids]
    elif not ids and loaded.eos_id is not None:
        ids = [loaded.eos_id]  # if the prompt is empty, generation starts after EOS
    if len(ids) >= longest:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, expected fewer than the {longest} of a "
            "training sequence"
        )
    sampling: dict[str, Any] = {}
    if options.temperature:
        sampling = {"temperature": options.temperature, "top_k": options.top_k}
    # Embeddings may have more rows than the tokenizer has tokens. The additional ids are
    # not sampled.
    beyond = list(range(loaded.get_vocab_size(), model.config.vocab_size))
    settings = GenerationConfig(
        max_new_tokens=min(options.max_new_tokens, longest - len(ids)),
        eos_token_id=loaded.eos_id,
        pad_token_id=loaded.eos_id,
        suppress_tokens=beyond or None,
        do_sample=bool(sampling),
        **sampling,
    )
    # The folder's generation config would fill in settings that are not set above.
    model.generation_config = GenerationConfig()
    inputs = torch.tensor([ids])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        (output,) = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=settings
        )
    return loaded.decode(output.tolist())
