"""model.overrides: written three ways, as dispersion.options, and known to everything
that builds or describes the model.
"""

import copy
import dataclasses
import json
import operator

import pytest
import torch.distributed.checkpoint as dcp

from tests.command_line import DEMO
from tests.pages import both_ways, changed, loaded
from tests.saved_run import change_config, random_model, save_run
from titan_disp.checks import check_config, resolve_tables
from titan_disp.cluster import plan as plans
from titan_disp.config.command_options import Machine
from titan_disp.errors import CheckpointError, ConfigError
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.report.gather import gather
from titan_disp.models import gpt2
from titan_disp.models.arguments import apply_overrides, architecture_of
from titan_disp.models.qwen3 import flavors
from titan_disp.run.identity import to_state
from titan_disp.tables import TABLES

NARROW = {"hidden_dim": 16, "n_layers": 2}
# Embedding; of two blocks: q, k, v and output matrices, norms of q and k, the
# feed-forward's three matrices, norms; last norm.
PARAMETERS = (
    2048 * 64
    + 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16 + 3 * 64 * 16 + 2 * 64)
    + 64
)


@pytest.mark.parametrize("key", TABLES)
@pytest.mark.parametrize(
    ("toml", "words", "found"),
    [
        ("{a = 16}", None, {"a": 16}),
        ('["a=16", "b=1e-5"]', None, {"a": 16, "b": 1e-5}),
        # Replaces the table
        (
            "{c = 32}",
            " a = 16, b=wide,flag=false,",
            {"a": 16, "b": "wide", "flag": False},
        ),
        ("{c = 32}", "", {}),
    ],
)
def test_ways_to_write_them(tmp_path, key, toml, words, found):
    (tmp_path / "c.toml").write_text(f'model.name = "qwen3_disp"\n{key} = {toml}')
    for config in both_ways(
        tmp_path / "c.toml", *(() if words is None else (f"--{key}={words}",))
    ):
        resolve_tables(config)
        read = operator.attrgetter(key)(config)
        assert repr(read) == repr(found)  # 16 is no 16.0
    for wrong in ("a", [16], "a=16,a=17"):
        with pytest.raises(
            ConfigError,
            match=f"{key}.* (expected key=value, as in --{key}|is given twice: 16 and 17)",
        ):
            resolve_tables(changed(config, {key: wrong}))


NANO = flavors["nano"]
GPT2 = gpt2.flavors["nano"]


def test_refused():
    for args, name, value, message in (
        (
            NANO,
            "hiden_dim",
            1,
            r"hiden_dim is not known \(did you mean hidden_dim\?\); expected dim, n_layers",
        ),
        (NANO, "attn_type", "flex", "attn_type is not known"),
        (NANO, "max_seq_len", 64, "max_seq_len cannot be set: it is training.seq_len"),
        (NANO, "qk_norm", False, "qk_norm cannot be set: Hugging Face's"),
        (NANO, "hidden_dim", 16.0, "hidden_dim is 16.0, expected a whole number ≥ 1"),
        (NANO, "hidden_dim", 0, "hidden_dim is 0, expected a whole number ≥ 1"),
        (
            NANO,
            "enable_weight_tying",
            1,
            "enable_weight_tying is 1, expected true or false",
        ),
        (NANO, "rope_theta", float("inf"), "rope_theta is inf, expected a number > 0"),
        (NANO, "n_heads", 5, "n_heads 5 is not a multiple of n_kv_heads 2"),
        (NANO, "head_dim", 15, "head_dim is 15, expected an even number"),
        (GPT2, "n_heads", 7, "dim 64 is not a multiple of n_heads 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            apply_overrides(copy.copy(args), {name: value})


def test_arguments_with_overrides():
    args = copy.copy(GPT2)
    changes = {"n_heads": 2, "norm_eps": 1.0, "enable_weight_tying": False}
    for _ in range(2):  # TorchTitan's hook may come after another caller
        apply_overrides(args, "n_heads=2,norm_eps=1,enable_weight_tying=false")
    assert repr(args) == repr(dataclasses.replace(GPT2, **changes))
    # the last is a sentence of TorchTitan's
    others = ("max_seq_len", "activations", "_enforced")
    assert architecture_of(args) == {
        k: v for k, v in vars(args).items() if k not in others
    }


def test_the_model_that_is_planned_trained_and_reported(tmp_path, monkeypatch):
    """One count of parameters by hand; the registered flavor stays as it is."""
    config = changed(loaded(DEMO), {"model.overrides": "hidden_dim=16,n_layers=2"})
    monkeypatch.setattr(plans, "MAX_NODES", 1)  # else it tries a thousand
    plan = plans.make_plan(config, Machine(1, 1))
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


def test_a_saved_model_is_read_as_what_it_is(sample, tmp_path):
    """config.json is written at every start, also at one that is refused for its other
    model.
    """
    model = random_model(overrides="n_layers=1,norm_eps=1e-5")
    run = save_run(
        tmp_path / "run",
        model,
        sample / "tokenizer",
        "--model.overrides",
        "n_layers=1,norm_eps=1e-5",
    )
    identity = {"identity": to_state(architecture_of(model.model_args))}
    dcp.save(
        model.state_dict() | identity,
        checkpoint_id=run / "checkpoint" / "step-40",
        no_dist=True,
    )
    assert load_model(find_saved(run)).norm.eps == 1e-5
    change_config(run, "model", overrides={"n_layers": 1})
    with pytest.raises(
        CheckpointError,
        match="step-40': norm_eps is 1e-05 in the checkpoint and 1e-06 in the config",
    ):
        load_model(find_saved(run))
