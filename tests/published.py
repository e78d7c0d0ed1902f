"""What a published flavor has in common with transformers' model of the same
config.json.
"""

import pytest
import torch
import transformers
from safetensors.torch import save_file

from titan_disp.errors import ConfigError
from titan_disp.models.hf import check_hf_folder
from titan_disp.models.registry import MODELS


def check_published(name, flavor, config, parameters, multiplying, others, folder):
    """The parameters by us and by transformers; its names and shapes of all weights;
    config.json as an import reads it; FLOPs.
    """
    entry = MODELS[name]
    args = entry.flavors[flavor]
    tied = config.tie_word_embeddings
    adapter = entry.adapter(args, None)
    with torch.device("meta"):
        model = entry.model_cls(args)
        theirs = getattr(transformers, adapter.transformers_class)(config)
    assert (
        (model.output.weight is model.tok_embeddings.weight)
        == args.enable_weight_tying
        == tied
    )
    assert theirs.num_parameters() == parameters
    shapes = {
        name: tuple(w.shape)
        for name, w in theirs.state_dict().items()
        if name != "lm_head.weight" or not tied
    }
    assert adapter.weight_shapes() == shapes
    config.save_pretrained(folder)
    save_file({"another": torch.zeros(1)}, folder / "model.safetensors")
    # But config.json fits
    with pytest.raises(
        ConfigError, match=rf"lacks {len(shapes)} of the {len(shapes)} weights"
    ):
        check_hf_folder(folder, adapter)
    for other in set(others) - {flavor}:
        with pytest.raises(ConfigError, match="holds another network than"):
            check_hf_folder(folder, entry.adapter(entry.flavors[other], None))
    counted, flops = args.get_nparams_and_flops(model, 512)
    assert counted == parameters
    # 6 FLOPs per parameter that multiplies, and attention's two products.
    assert (
        flops
        == 6 * multiplying + 6 * args.n_layers * args.n_heads * 2 * args.head_dim * 512
    )
