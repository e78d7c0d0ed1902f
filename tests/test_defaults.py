"""Whose the numbers are: the defaults of the loss, and the authors' recipes in
train_configs/authors.
"""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import tomli

from tests.command_line import ROOT
from tests.distributed import spawn
from tests.pages import can_start, changed, loaded
from titan_disp.checks import build_dispersion_losses
from titan_disp.config.keys import SOURCES, TORCHTITAN, facts_of
from titan_disp.config.load import load_config
from titan_disp.dispersion import DispersionLoss
from titan_disp.dispersion.variants.base import MIN_TAU
from titan_disp.job_config import all_keys
from titan_disp.schedules import CoeffSchedule

AUTHORS = ROOT / "train_configs" / "authors"
FINEWEB, C4, WHOLE_C4 = (
    AUTHORS / f"pretrain_0.6b_{data}.toml" for data in ("fineweb_edu", "c4", "c4_156b")
)
MIDTRAIN = AUTHORS / "midtrain_qwen3_0.6b_wikitext.toml"
GPT2 = AUTHORS / "midtrain_gpt2_wikitext.toml"
# Whose the numbers of the loss are, by hand. The rest of [dispersion] is our choice.
PAPER = {"coeff", "tau", "variant"}
RELEASED = {
    "layers",
    "final_norm",
    "clamp",
    "norm_eps",
    "max_tokens",
    "norm_coeff",
    "include_diagonal",
}
RELEASED |= {"warmup_steps", "decay"}


def test_whose_the_defaults_are():
    """Those of the loss as known by hand; the others as docs/configuration.md says,
    which a test compares.
    """
    loss = {
        name: facts_of(field).source
        for name, field in all_keys().items()
        if name.startswith("dispersion.")
    }
    for source, known in (("paper", PAPER), ("authors", RELEASED)):
        assert {
            name.removeprefix("dispersion.") for name in loss if loss[name] == source
        } == known
    sources = {name: text for name, text in SOURCES.items() if name != TORCHTITAN}
    assert {facts_of(field).source for field in all_keys().values()} <= sources.keys()
    _, _, page = (
        (ROOT / "docs" / "loss.md")
        .read_text()
        .partition("## Where the defaults come from")
    )
    assert re.findall(r"^- \*\*(.*?)\*\*", page, flags=re.M)[: len(sources)] == list(
        sources.values()
    )


def test_every_key_of_the_loss_is_used():
    """checks.py passes a key on as the option of the same name, if there is one."""
    options = {
        field.name
        for kind in (DispersionLoss, CoeffSchedule)
        for field in dataclasses.fields(kind)
    }
    own = {
        name.removeprefix("dispersion.")
        for name in all_keys()
        if name.startswith("dispersion.")
    }
    assert facts_of(all_keys()["dispersion.tau"]).least == MIN_TAU
    # The spec and the models read these.
    assert own - options == {
        "enabled",
        "layers",
        "final_norm",
        "losses",
        "within_documents",
    }
    seeds = {"debug.seed": 5, "stream.seed": 7, "dispersion.enabled": True}
    ((_, loss),) = build_dispersion_losses(changed(loaded(MIDTRAIN), seeds)).values()
    assert loss.seed == 5


# What is known of the recipes, by hand: the authors' released code and its fork of
# TorchTitan, as docs/loss.md cites them.
COMMON = """
optimizer = {name = "AdamW", weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8}
training = {max_norm = 1.0, seq_len = 4096, mixed_precision_param = "bfloat16"}
dispersion = {enabled = true, layers = "all"}
"""
PRETRAIN = """
model = {flavor = "0.6B_untied"}
optimizer = {lr = 3e-4}
training = {local_batch_size = 4}
dispersion = {final_norm = false}
"""
ANGULAR = 'dispersion = {variant = "angular", coeff = 0.1, tau = 1.0, norm_eps = 1e-2, estimator = "sampled"}'
MIDTRAINING = """
optimizer = {lr = 5e-5}
checkpoint = {initial_load_in_hf = true}
training = {dtype = "float32"}
lr_scheduler = {decay_type = "cosine", min_lr_factor = 0.0}
dispersion = {final_norm = true}
"""
LAST_GENERATION = """
lr_scheduler = {decay_type = "cosine", min_lr_factor = 0.1}
training = {dtype = "bfloat16"}
dispersion = {clamp = 1e-2, max_tokens = 256}
"""
SHARED = {
    FINEWEB: (COMMON, PRETRAIN, ANGULAR, LAST_GENERATION),
    WHOLE_C4: (COMMON, PRETRAIN, ANGULAR, LAST_GENERATION),
    C4: (COMMON, PRETRAIN),
    MIDTRAIN: (COMMON, MIDTRAINING, ANGULAR),
    GPT2: (COMMON, MIDTRAINING, ANGULAR),
}
RECIPES = {
    FINEWEB: """
training = {steps = 9537, global_batch_size = 256} # 10e9 tokens / (256 × 4096)
lr_scheduler = {warmup_steps = 500}
""",
    WHOLE_C4: """
training = {steps = 29755, global_batch_size = 1280, local_batch_size = 2, dataset = "c4"} # 156e9 tokens / (1280 × 4096)
lr_scheduler = {warmup_steps = 1488} # 5 % of these
""",
    C4: """
training = {steps = 1000, global_batch_size = -1, dataset = "c4", dtype = "float32"}
lr_scheduler = {warmup_steps = 2, decay_type = "linear", min_lr_factor = 0.0}
dispersion = {variant = "decorrelation", coeff = 1.0, estimator = "exact"}
""",
    MIDTRAIN: """
model = {flavor = "0.6B"}
optimizer = {eps = 3.125e-10} # as of a sum over 32 steps: test_authors_recipes.py
training = {max_norm = 0.03125, steps = 1526, global_batch_size = 32, local_batch_size = 1} # 200e6 tokens / (32 × 4096)
lr_scheduler = {warmup_steps = 306} # 20 % of these
dispersion = {clamp = 0.25, max_tokens = 256}
""",
    GPT2: """
model = {name = "gpt2_disp", flavor = "124M"}
optimizer = {eps = 2.5e-9} # of a sum over 4 steps
training = {max_norm = 0.25, seq_len = 1024, steps = 1526, global_batch_size = 128, local_batch_size = 16}
lr_scheduler = {warmup_steps = 306}
dispersion = {clamp = 0.1, max_tokens = 256}
""",
}


def test_recipes():
    """All are listed above, pass the checks of a start on one GPU and on more, and have
    the values that are known.
    """
    assert set(AUTHORS.glob("*.toml")) == set(RECIPES) == set(BOUNDS)
    for file, own in RECIPES.items():
        can_start(8, file)
        config = can_start(1, file)
        known = {}
        for table in map(tomli.loads, (*SHARED[file], own)):
            known |= {
                (section, key): table[section][key]
                for section in table
                for key in table[section]
            }
        found = {
            (section, key): getattr(getattr(config, section), key)
            for section, key in known
        }
        assert found == known, file.name


def test_every_line_of_a_recipe_names_its_source():
    for file in RECIPES:
        header, _, body = file.read_text().partition("\n\n")
        sources = set(re.findall(r"^#   \[(\w+)\] ", header, re.M))
        assert "ours" in sources
        assert "cannot be matched" in header
        for line in body.splitlines():
            if line and not re.fullmatch(r"\[\w+\]", line):
                named = re.findall(r"\[(\w+)\]", line.partition("#")[2])
                assert named, line
                assert set(named) <= sources, line


# The bounds of the dispersion loss, which is a mean of exp(−D/τ) with D from
# arccos(1−κ)/π to 1 − that, or of squared correlations.
BOUNDS = {FINEWEB: (-0.955, -0.045), WHOLE_C4: (-0.955, -0.045), C4: (0, 1)}
BOUNDS |= {MIDTRAIN: (-0.77, -0.23), GPT2: (-0.86, -0.14)}


def three_steps_of_each(sample, folder):
    from titan_disp.run.reader import read_metrics
    from titan_disp.train import DispTrainer

    for file, (least, most) in BOUNDS.items():
        arguments = [
            *(
                "--job.config_file",
                str(file),
                "--model.flavor=nano",
                f"--model.hf_assets_path={sample}/tokenizer",
            ),
            *(
                f"--training.dataset_path={sample}",
                f"--job.dump_folder={folder}/{file.stem}",
                "--stream.prefetch=0",
            ),
            *(
                "--training.local_batch_size=1",
                "--training.global_batch_size=2",
                "--training.seq_len=32",
            ),
            *(
                "--training.steps",
                "3",
                "--budget.tokens",
                "0",
                "--lr_scheduler.warmup_steps",
                "0",
            ),
            *(
                "--metrics.log_freq",
                "1",
                "--condensation.interval",
                "0",
                "--optimizer.implementation",
                "foreach",
            ),
            *("--checkpoint.no-enable", "--checkpoint.no-initial_load_in_hf"),
            *("--stream.separator", ""),  # the sample's tokenizer has its own
            *(
                ("--dispersion.max_tokens", "16")
                if 'estimator = "sampled"' in file.read_text()
                else ()
            ),
        ]
        job = load_config(arguments)
        trainer = DispTrainer(job)
        trainer.train()
        (dtype,) = {str(p.dtype) for p in trainer.model_parts[0].parameters()}
        assert dtype == f"torch.{job.training.dtype}"
        trainer.close()
        rows = read_metrics(Path(folder) / file.stem)
        assert list(rows) == [1, 2, 3]
        for step, row in rows.items():
            assert row["tokens"] == step * 2 * 32
            assert row["loss"] == pytest.approx(
                row["ce"] + job.dispersion.coeff * row["dispersion"], abs=1e-5
            )
            assert least <= row["dispersion"] <= most
            assert 0 < row["grad_norm"] < math.inf


@pytest.mark.slow
def test_recipes_train(sample, tmp_path):
    spawn(1, three_steps_of_each, str(sample), str(tmp_path))
