"""These helpers write a run's folder with a checkpoint of random weights, without
training.
"""

import json

import torch
import torch.distributed.checkpoint as dcp

from tests.command_line import DEMO
from titan_disp.config.load import load_config
from titan_disp.models.registry import MODELS, model_args

SEQ_LEN = 64


def random_model(std=0.2, flavor="nano", name="qwen3_disp", overrides=""):
    """Build a model in eval mode.

    Its weights are large, so that logits depend on every one of them.
    """
    args = model_args(name, flavor, overrides)
    args.max_seq_len = SEQ_LEN
    model = MODELS[name].model_cls(args)
    torch.manual_seed(3)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), std)
    return model.eval()


def save_run(folder, model, tokenizer, *options, step=30):
    """Write a run's config.json, environment.json, metrics.jsonl up to step 50, and one
    checkpoint of ``step``.
    """
    given = (
        "--model.hf_assets_path",
        str(tokenizer),
        "--training.seq_len",
        str(SEQ_LEN),
    )
    config = load_config(["--job.config_file", str(DEMO), *given, *options])
    folder.mkdir(parents=True)
    environment = {"python": "3.1", "packages": {"torch": "2.99"}, "world_size": 7}
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "environment.json").write_text(json.dumps(environment))
    rows = (
        {
            "step": s,
            "time": s,
            "ce": 9 - s / 10,
            "dispersion": -s / 100,
            "tokens": s * 1024,
        }
        for s in (10, 20, 50)
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    state = model.state_dict() | {"optimizer.state": torch.zeros(8)}
    dcp.save(state, checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)
    return folder


def change_config(run, section, **changes):
    file = run / "config.json"
    config = json.loads(file.read_text())
    config[section] |= changes
    file.write_text(json.dumps(config))
    return config
