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
    """Return a transformers model, its tokenizer, and the tokens of its longest
    sequence.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    if (Path(target) / "config.json").is_file() and not is_run(target):
        model = load_causal_lm(target)
        return (
            model,
            load_tokenizer(tokenizer or target),
            longest_sequence(model.config) or sys.maxsize,
        )
    saved = find_saved(target)
    loaded = saved.tokenizer(tokenizer)
    adapter = saved.adapter()
    theirs = getattr(transformers, adapter.transformers_class)
    config = theirs.config_class(**hf_config(adapter, loaded, "float32"))
    model = theirs.from_pretrained(None, config=config, state_dict=hf_weights(saved))
    return model, loaded, adapter.model_args.max_seq_len


def generate(options: GenerateOptions) -> str:
    """Return a prompt and its continuation up to EOS, ``max_new_tokens``, or the
    sequence length of training.
    """
    from transformers import GenerationConfig

    check_least(options, max_new_tokens=1, temperature=0, top_k=0)
    model, loaded, longest = _load(options.target, options.tokenizer)
    begin = [] if loaded.bos_id is None else [loaded.bos_id]
    end = [] if loaded.eos_id is None else [loaded.eos_id]
    ids = begin + loaded.plain(options.prompt) or end
    if len(ids) >= longest:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, expected fewer than the {longest} of "
            "training"
        )
    sampling: dict[str, Any] = {}
    if options.temperature:
        sampling = {"temperature": options.temperature, "top_k": options.top_k}
    # The embedding may have more rows than the tokenizer has tokens: do not sample
    # these rows.
    beyond = list(range(loaded.get_vocab_size(), model.config.vocab_size))
    settings = GenerationConfig(
        max_new_tokens=min(options.max_new_tokens, longest - len(ids)),
        eos_token_id=loaded.eos_id,
        pad_token_id=loaded.eos_id,
        suppress_tokens=beyond or None,
        do_sample=bool(sampling),
        **sampling,
    )
    # a folder's own would fill in what is not set above
    model.generation_config = GenerationConfig()
    inputs = torch.tensor([ids])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        (output,) = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=settings
        )
    return loaded.decode(output.tolist())
