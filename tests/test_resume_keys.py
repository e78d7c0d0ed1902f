"""A resume is refused if, and only if, a key that fixes the data or the model has
another value, whichever key it is.
"""

import re
import shutil
from dataclasses import fields
from types import SimpleNamespace
from typing import get_args

import pytest
import torch.distributed.checkpoint as dcp

from tests.command_line import DEMO
from tests.pages import changed, loaded
from titan_disp.checks import tokenizer_of
from titan_disp.config.batch import tokens_per_step
from titan_disp.config.keys import facts_of
from titan_disp.data.loader import open_stream
from titan_disp.data.options import StreamOptions, stream_options
from titan_disp.data.position import Field
from titan_disp.data.sources import training_sets
from titan_disp.errors import ConfigError, RefusedError
from titan_disp.job_config import Source, all_keys, fixed
from titan_disp.models.registry import args_of
from titan_disp.run.identity import STEP as PER_STEP
from titan_disp.run.identity import check_identity, check_resume, of_model, to_state

# By hand: what decides which tokens a slot gets, and which model is trained. Does a new
# key?
DATA = {
    "sources",
    "slots",
    "seed",
    "shuffle_window",
    "max_document_mb",
    "text_field",
    "text_split",
    "token_dtype",
    "separator",
}
MODEL = {
    "model.overrides",
    "baseline.method",
    "stream.document_mask",
    "stream.restart_positions",
}
STEP = 7
EPOCH = 2


def start(job, tokenizer, checkpoint):
    args = args_of(job)
    args.update_from_config(job)
    files = [file for one in training_sets(job) for file in one.files()]
    return SimpleNamespace(
        job_config=job,
        identity=of_model(job, args) | {PER_STEP: tokens_per_step(job, 1)},
        dataloader=open_stream(job, files, tokenizer, 1, 0),
        checkpointer=SimpleNamespace(
            _create_checkpoint_id=lambda step: str(checkpoint), exclude_from_loading=[]
        ),
        events=(events := []),
        event=lambda name, step, **details: events.append(
            (name, step, details["epoch"])
        ),
    )


@pytest.fixture(scope="module")
def run(sample, tmp_path_factory):
    """The config of a run whose checkpoint is in its third epoch, and a function that
    resumes from it with other keys.
    """
    checkpoint = tmp_path_factory.mktemp("run") / f"step-{STEP}"
    job = changed(
        loaded(DEMO),
        {
            "model.hf_assets_path": f"{sample}/tokenizer",
            "training.dataset_path": str(sample),
        },
    )
    tokenizer = tokenizer_of(job)
    first = start(job, tokenizer, checkpoint)
    first.dataloader.positions[3, Field.EPOCH] = EPOCH
    states = {
        "dataloader": first.dataloader.state_dict(),
        "identity": to_state(first.identity),
    }
    dcp.save(states, checkpoint_id=checkpoint, no_dist=True)

    def resume(changes):
        again = start(changed(job, changes), tokenizer, checkpoint)
        check_resume(again, STEP)
        return again

    return job, resume


def another(name, field, value):
    special = {
        "model.overrides": {"n_layers": 5},
        "dispersion.options": {"margin": 0.5},
    }
    special["stream.separator"] = "none"
    special["dispersion.losses"] = [{"variant": "cosine"}]
    special["stream.left_out"] = ("name",)
    if name in special:
        return special[name]
    if field.type in (bool, int, float, str):
        return (
            not value
            if field.type is bool
            else value + ("x" if field.type is str else 1)
        )
    literals = [
        literal
        for kind in (field.type, *get_args(field.type))
        for literal in get_args(kind)
    ]
    return next(
        literal for literal in literals if isinstance(literal, str) and literal != value
    )


def test_every_declared_key(run, sample):
    job, resume = run
    assert set(fixed("data")) == {f"stream.{key}" for key in DATA}
    assert set(fixed("model")) == MODEL
    for name, field in all_keys().items():
        # gigatoken's ids are compared at every start. Nothing is indexed here:
        # test_data_index.py refuses another index.
        if name in ("stream.fast_tokenizer", "stream.index"):
            continue
        section, key = name.split(".")
        if name == "stream.sources":
            changes = {
                name: [Source(1.0, str(sample), "c4", "web")],
                "training.dataset_path": None,
            }
        else:
            changes = {name: another(name, field, getattr(getattr(job, section), key))}
        if section == "dispersion":
            with pytest.raises(
                ConfigError,
                match=rf"another loss: {name} is .*--checkpoint.allow_other_loss",
            ):
                resume(changes)
            assert (
                resume(changes | {"checkpoint.allow_other_loss": True}).events == []
            ), name
        elif facts_of(field).fixes is None:
            assert resume(changes).events == [], name
        else:
            with pytest.raises(
                ConfigError,
                match={"model.overrides": "n_layers is 6 in .* 5 in"}.get(name, name),
            ):
                resume(changes)
        if name in fixed("data") and name != "stream.sources":
            loaders = [
                start(changed(job, keys), tokenizer_of(job), None).dataloader
                for keys in ({}, changes)
            ]
            for then, now in (loaders, loaders[::-1]):
                values = (
                    f"{then.fingerprint[name]!r} then, {now.fingerprint[name]!r} now."
                )
                with pytest.raises(
                    ConfigError, match=re.escape(f"data: {name}: {values}")
                ):
                    now.load_state_dict(then.state_dict())


def test_every_option_of_the_stream_is_that_of_its_key():
    job = loaded(DEMO)
    keys = {
        name: field for name, field in all_keys().items() if name.startswith("stream.")
    }
    for option in {field.name for field in fields(StreamOptions)} & {
        name.removeprefix("stream.") for name in keys
    }:
        value = another(
            name := f"stream.{option}", keys[name], getattr(job.stream, option)
        )
        found = stream_options(
            changed(job, {name: value, "comm.train_timeout_seconds": 999})
        )
        assert getattr(found, option) == value, option
    assert (
        stream_options(changed(job, {"stream.max_document_mb": 0.5})).max_document_bytes
        == 1 << 19
    )


def test_keys_of_torchtitan(run, sample, tmp_path):
    shutil.copytree(sample / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "en").mkdir()
    shutil.copy(sorted((sample / "en").glob("*train*"))[0], tmp_path / "en")
    _, resume = run
    assert resume({"model.hf_assets_path": str(tmp_path / "tokenizer")}).events == []
    (file,) = (tmp_path / "tokenizer").iterdir()
    file.write_bytes(file.read_bytes() + b" ")
    for key, value, message in (
        (
            "model.name",
            "gpt2_disp",
            "model.name is 'qwen3_disp' in the checkpoint and 'gpt2_disp'",
        ),
        ("model.flavor", "debugmodel", "dim is"),
        ("training.seq_len", 128, "training.seq_len: 256 then, 128 now"),
        (
            "model.hf_assets_path",
            str(tmp_path / "tokenizer"),
            "other data: tokenizer: '",
        ),
        (
            "training.dataset_path",
            str(tmp_path),
            "other data: data: 8 files then, 1 now, with 7 differences",
        ),
        (
            "training.global_batch_size",
            8,
            "stream.slots: 16 then, 8 now. The number of slots is training.global_",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            resume({key: value})


def test_a_budget_keeps_the_tokens_of_a_step(sample, tmp_path):
    """Its tokens are steps times those of one: with twice as many per step, half of a
    run would be the whole.
    """
    places = {
        "model.hf_assets_path": f"{sample}/tokenizer",
        "training.dataset_path": str(sample),
        "stream.slots": 8,
    }
    job = changed(loaded(DEMO), places | {"budget.tokens": 99999})
    saved = start(
        changed(job, {"budget.tokens": 0}), tokenizer := tokenizer_of(job), None
    )
    states = {
        "dataloader": saved.dataloader.state_dict(),
        "identity": to_state(saved.identity),
    }
    dcp.save(states, checkpoint_id=tmp_path)
    larger = {"training.global_batch_size": 32}
    for more in ({}, {"budget.tokens": 0, "budget.stop_at_tokens": 9}):
        with pytest.raises(
            RefusedError,
            match="^tokens of a step is 4096 in the checkpoint and 8192 in the config: ",
        ):
            check_resume(start(changed(job, larger | more), tokenizer, tmp_path), STEP)
    for changes, step in (
        (larger | {"budget.tokens": 0}, STEP),
        (larger, 0),
        ({}, STEP),
    ):
        check_resume(start(changed(job, changes), tokenizer, tmp_path), step)
    other = start(
        changed(job, {"baseline.method": "noisy_embedding", "stream.seed": 5}),
        tokenizer,
        tmp_path,
    )
    # of a seed checkpoint, too, only the data may differ
    with pytest.raises(ConfigError, match="baseline.method"):
        check_resume(other, 0)


def test_other_data_begin_a_new_epoch_if_they_may(run):
    """After the last epoch that any slot has begun.

    Another model is refused all the same.
    """
    _, resume = run
    again = resume({"stream.seed": 5, "stream.on_mismatch": "restart"})
    assert again.events == [("streams_restarted", STEP, EPOCH + 1)]
    assert again.dataloader.positions[:, Field.EPOCH].tolist() == [EPOCH + 1] * 16
    assert again.checkpointer.exclude_from_loading == ["dataloader"]
    with pytest.raises(ConfigError, match="baseline.method"):
        resume({"baseline.method": "noisy_embedding", "stream.on_mismatch": "restart"})


def test_a_key_that_the_checkpoint_lacks_had_its_default(run):
    """Its version did not know the key, of the loss as of the model."""
    job, _ = run
    current = of_model(job, args_of(job))
    for key, value in (("dispersion.tau", 0.5), ("stream.document_mask", True)):
        saved = {name: x for name, x in current.items() if name != key}
        check_identity(saved, current)
        with pytest.raises(
            RefusedError, match=f"{key} is .* in the checkpoint and {value}"
        ):
            check_identity(saved, current | {key: value})
    # Without a loss, its keys are not compared.
    off = {"dispersion.enabled": False}
    without = {name: x for name, x in current.items() if "dispersion" not in name} | off
    with pytest.raises(RefusedError, match="another loss: dispersion.enabled is False"):
        check_identity(without, current)
