"""model.overrides: written three ways, checked, and known to everything that builds or describes the model."""

import json
from dataclasses import dataclass

import pytest
import tomli
import torch.distributed.checkpoint as dcp
from torchtitan.config import ConfigManager

from tests.command_line import DEMO, ROOT
from tests.saved_run import random_model, save_run
from titan_disp.cluster.plan import make_plan
from titan_disp.config.checks import check_config
from titan_disp.config.load import load_config
from titan_disp.config.options import Machine
from titan_disp.errors import CheckpointError, ConfigError
from titan_disp.job_config import fixed
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.report.gather import gather
from titan_disp.models.arguments import apply_overrides, architecture_of, named, parse_overrides
from titan_disp.models.qwen3 import flavors
from titan_disp.models.registry import args_of, model_args
from titan_disp.run.identity import Identity, check_identity, differences, of_model

NARROW = {"hidden_dim": 16, "n_layers": 2}
# Embedding; of two blocks: q, k, v and output matrices, norms of q and k, the feed-forward's three matrices, norms; last norm.
PARAMETERS = 2048 * 64 + 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16 + 3 * 64 * 16 + 2 * 64) + 64


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"hidden_dim": 16}, {"hidden_dim": 16}),
        (["hidden_dim=16", "norm_eps=1e-5"], {"hidden_dim": 16, "norm_eps": 1e-5}),
        (" hidden_dim = 16, depth_init=false,", {"hidden_dim": 16, "depth_init": False}),
        ("hidden_dim=wide", {"hidden_dim": "wide"}),
        ("", {}),
        ((), {}),
    ],
)
def test_ways_to_write_them(written, found):
    parsed = parse_overrides(written)
    assert parsed == found
    assert list(map(type, parsed.values())) == list(map(type, found.values()))


@pytest.mark.parametrize("written", ["hidden_dim", [16], "hidden_dim=16,hidden_dim=17"])
def test_what_cannot_be_read(written):
    with pytest.raises(ConfigError, match=r"model.overrides.* (expected key=value|is given twice: 16 and 17)"):
        parse_overrides(written)


MODEL = '[model]\nname = "qwen3_disp"\nflavor = "nano"\n'


@pytest.mark.parametrize(
    ("toml", "words", "found"),
    [
        ("overrides = {hidden_dim = 16}", (), {"hidden_dim": 16}),
        ("[model.overrides]\nhidden_dim = 16", (), {"hidden_dim": 16}),
        ('overrides = ["hidden_dim=16"]', (), {"hidden_dim": 16}),
        ("", ("--model.overrides", "hidden_dim=16,n_layers=2"), NARROW),
        ("overrides = {dim = 32}", ("--model.overrides=hidden_dim=16,n_layers=2",), NARROW),  # replaces the table
        ("overrides = {dim = 32}", ("--model.overrides", ""), {}),
        ("", (), {}),
    ],
)
def test_from_toml_and_the_command_line(tmp_path, toml, words, found):
    """Through TorchTitan's own parser too, as its own trainer uses it."""
    file = tmp_path / "c.toml"
    file.write_text(MODEL + toml)
    assert parse_overrides(load_config(["--job.config_file", str(file), *words]).model.overrides) == found
    stock = ["--job.config_file", str(file), "--job.custom_config_module", "titan_disp.job_config", *words]
    assert parse_overrides(ConfigManager().parse_args(stock).model.overrides) == found


@dataclass
class OtherArgs:
    """Of a model that this package does not know."""

    dim: int = 60
    n_heads: int = 6
    dropout: float = 0.1
    max_seq_len: int = 64
    bias: bool = True
    name: str = "other"


@pytest.mark.parametrize(
    ("args", "overrides", "message"),
    [
        (
            flavors["nano"],
            {"hiden_dim": 1},
            r"overrides.hiden_dim is not known \(did you mean hidden_dim\?\); expected dim, n_layers",
        ),
        (flavors["nano"], {"attn_type": "flex"}, r"attn_type is not known"),
        (flavors["nano"], {"activations": 1}, r"activations is not known"),
        (flavors["nano"], {"max_seq_len": 64}, r"max_seq_len cannot be set: it is training.seq_len"),
        (flavors["nano"], {"qk_norm": False}, r"qk_norm cannot be set: Hugging Face's"),
        (flavors["nano"], {"hidden_dim": 16.0}, r"hidden_dim is 16.0, expected a whole number ≥ 1"),
        (flavors["nano"], {"hidden_dim": 0}, r"hidden_dim is 0, expected a whole number ≥ 1"),
        (flavors["nano"], {"hidden_dim": True}, r"hidden_dim is True, expected a whole"),
        (flavors["nano"], {"hidden_dim": "16"}, r"hidden_dim is '16', expected a whole"),
        (flavors["nano"], {"enable_weight_tying": 1}, r"enable_weight_tying is 1, expected true or false"),
        (flavors["nano"], {"rope_theta": "inf"}, r"rope_theta is 'inf', expected a number > 0"),
        (flavors["nano"], {"rope_theta": float("inf")}, r"rope_theta is inf, expected a number > 0"),
        (flavors["nano"], {"n_heads": 5}, r"n_heads 5 is not a multiple of n_kv_heads 2"),
        (flavors["nano"], {"head_dim": 15}, r"head_dim is 15, expected an even number"),
        (OtherArgs(), {"n_heads": 7}, r"dim 60 is not a multiple of n_heads 7"),
        (OtherArgs(), {"name": "x"}, r"name is not known; expected dim, n_heads, dropout, bias"),
    ],
)
def test_refused(args, overrides, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(args, overrides)


def test_any_dataclass_of_arguments():
    args = OtherArgs()
    for _ in range(2):  # TorchTitan's hook may come after another caller
        apply_overrides(args, "n_heads=4,dropout=1,bias=false")
    assert args == OtherArgs(n_heads=4, dropout=1.0, bias=False)
    assert architecture_of(args) == {"dim": 60, "n_heads": 4, "dropout": 1.0, "bias": False, "name": "other"}


def test_the_model_that_is_planned_trained_and_reported(tmp_path):
    """One count of parameters by hand; the registered flavor stays as it is."""
    config = load_config(["--job.config_file", str(DEMO), "--model.overrides", "hidden_dim=16,n_layers=2"])
    plan = make_plan(config, Machine(1, 1))
    assert plan.model.parameters == PARAMETERS
    # The two blocks' outputs are dispersed, of 4 sequences of 256 tokens.
    assert plan.memory.dispersion == 2 * 4 * 256 * 64 * 4
    args = flavors["nano"]
    args.update_from_config(config)
    assert (args.hidden_dim, args.n_layers, args.activations) == (16, 2, (1, 2))
    assert (flavors["nano"].hidden_dim, flavors["nano"].n_layers) == (192, 6)

    check_config(config, 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config.to_dict()))
    (run / "metrics.jsonl").write_text("")
    (found,) = gather([str(run)])
    assert found.parameters == PARAMETERS
    assert found.model == "qwen3_disp nano with hidden_dim = 16, n_layers = 2"
    assert {key: found.settings[f"model.overrides.{key}"] for key in NARROW} == NARROW


def test_names():
    assert named("0.6B", {}) == "0.6B"
    assert named("0.6B", {"enable_weight_tying": False}) == "0.6B with enable_weight_tying = false"


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        (
            "n_layers=5",
            ["n_layers is 6 in the checkpoint and 5 in the config"],
        ),  # a part of the tensors, which would load
        (
            "n_kv_heads=1,head_dim=32",
            [
                "n_kv_heads is 2 in the checkpoint and 1 in the config",
                "head_dim is 16 in the checkpoint and 32 in the config",
            ],
        ),
        ("norm_eps=1e-5", ["norm_eps is 1e-06 in the checkpoint and 1e-05 in the config"]),
        ("hidden_dim=192", []),  # as the flavor has it
    ],
)
def test_a_run_keeps_its_model(overrides, differs):
    """However its sizes are written; lengths of sequences are other checks'."""
    saved = json.loads(Identity(architecture_of(flavors["nano"])).state_dict()["json"])
    args = model_args("qwen3_disp", "nano", overrides)
    args.max_seq_len, args.activations = 7, (1,)
    now = architecture_of(args)
    assert sorted(differences(saved, now)) == sorted(differs)
    check_identity({}, now)  # of TorchTitan's own trainer


def test_every_key_that_fixes_the_model():
    """A resume with another value of such a key is refused."""
    changes = {
        "baseline.method": ("active_forgetting", "baseline.method is 'none' in the checkpoint and 'active_forgetting'"),
        "model.overrides": ("n_layers=5", "n_layers is 6 in the checkpoint and 5"),
        "model.flavor": ("debugmodel", "dim is"),
        "model.name": ("gpt2_disp", "model.name is 'qwen3_disp' in the checkpoint and 'gpt2_disp'"),
    }
    assert changes.keys() == {*fixed("model"), "model.name", "model.flavor"}
    kept = load_config(["--job.config_file", str(DEMO)])
    for key, (value, message) in changes.items():
        now = load_config(["--job.config_file", str(DEMO), f"--{key}", value])
        with pytest.raises(ConfigError, match=message):
            check_identity(of_model(kept, args_of(kept)), of_model(now, args_of(now)))


def test_a_saved_model_is_read_as_what_it_is(sample, tmp_path):
    """config.json is written at every start, also at one that is refused for its other model."""
    model = random_model(overrides="n_layers=1,norm_eps=1e-5")
    run = save_run(tmp_path / "run", model, sample / "tokenizer", "--model.overrides", "n_layers=1,norm_eps=1e-5")
    identity = {"identity": Identity(architecture_of(model.model_args)).state_dict()}
    dcp.save(model.state_dict() | identity, checkpoint_id=run / "checkpoint" / "step-40", no_dist=True)
    assert load_model(find_saved(run)).norm.eps == 1e-5
    config = json.loads((run / "config.json").read_text())
    config["model"]["overrides"] = {"n_layers": 1}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="step-40': norm_eps is 1e-05 in the checkpoint and 1e-06 in the config"):
        load_model(find_saved(run))


def test_the_width_sweep_varies_widths_and_seeds_alone():
    grid = tomli.loads((ROOT / "train_configs" / "sweeps" / "mlp_width.toml").read_text())["grid"]
    assert set(grid) == {"debug.seed, stream.seed", "model.overrides"}
    assert len(grid["model.overrides"]) >= 4
    assert all(list(parse_overrides(width)) == ["hidden_dim"] for width in grid["model.overrides"])
