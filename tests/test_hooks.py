"""attach() against the plain loss of hidden states, in models of transformers and
torch: alone, on ranks, checkpointed.
"""

import copy
import functools
import math
import re
import weakref
from collections import UserDict

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.distributed import spawn
from tests.mesh import full
from titan_disp.dispersion import attach, dispersion_losses

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "d_head": 8,
}
OTHERS = {
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": False,
}
DROPOUT = (
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)
# two ranks get equal numbers
TOKENS = torch.arange(12) < torch.tensor([12, 9, 8, 11])[:, None]
# Which blocks are compared, and where their outputs are in hidden_states: in two
# models, the last one is after the final norm.
COMPARED = {
    "GPT2LMHeadModel": ([f"transformer.h.{i}" for i in range(3)], slice(1, -1)),
    "LlamaForCausalLM": ([f"model.layers.{i}" for i in range(3)], slice(1, -1)),
    "BertForMaskedLM": (None, slice(1, None)),
}


def model_of(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return (
        kind(kind.config_class(**SIZES, **OTHERS, **dict.fromkeys(DROPOUT, 0.0)))
        .double()
        .train()
    )


def encoder(**options):
    """Torch's own.

    A list inside of blocks is no list of blocks, although it is longer.
    """
    block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, **options)
    block.experts = nn.ModuleList(nn.Identity() for _ in range(8))
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False).double()


def hybrid():
    """A model whose blocks are of two classes."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.GELU()])
    return model


def batch(part=slice(None)):
    ids = torch.randint(2, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    every = {
        "labels": ids.masked_fill(~TOKENS, -100),
        "attention_mask": TOKENS.long(),
        "input_ids": ids,
    }
    return {name: x[part] for name, x in every.items()}


def backward(model, loss):
    loss.backward()
    gradients = [full(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


def step(model, handle, **given):
    return backward(model, model(**(given or batch())).loss + handle.loss())


close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", COMPARED)
def test_against_hidden_states(name):
    model = model_of(name)
    (blocks, of_blocks) = COMPARED[name]
    out = model(**batch(), output_hidden_states=True)
    losses = dispersion_losses(out.hidden_states[of_blocks], valid=TOKENS, tau=0.5)
    by_hand = backward(model, out.loss + 2 * losses.mean())
    with attach(model, blocks, coeff=2, tau=0.5) as handle:
        close(step(model, handle), by_hand)
        close(torch.stack([*handle.losses.values()]), losses.detach().mean(1))
        handle.mask = TOKENS.flip(0)
        weights = torch.arange(4.0).double()
        model(**batch())
        losses = dispersion_losses(
            out.hidden_states[of_blocks], valid=TOKENS.flip(0), tau=0.5
        )
        close(handle.loss(weights), 2 * (weights * losses.mean(0)).sum())
        close(step(model, handle), by_hand)  # without the mask, which was for one loss
    model(**batch())
    assert not handle._outputs


def test_torchs_own_encoder():
    model = encoder(batch_first=True)
    z = torch.randn(4, 12, 16).double()
    padding = ~TOKENS
    zs = []
    handle = attach(model, coeff=2)
    found = backward(
        model, model(z, src_key_padding_mask=padding).square().mean() + handle.loss()
    )
    for layer in model.layers:
        zs.append(z := layer(z, src_key_padding_mask=padding))
    close(
        found,
        backward(
            model, z.square().mean() + 2 * dispersion_losses(zs, valid=TOKENS).mean()
        ),
    )


def additive(tokens):
    return torch.zeros(tokens.shape).masked_fill(~tokens, -torch.inf)


ADDITIVE = additive(TOKENS)


@pytest.mark.parametrize(
    "mask",
    [
        *(TOKENS, TOKENS.long(), TOKENS.double()),
        *(ADDITIVE, ADDITIVE.clamp(-1e4), ADDITIVE.clamp(-1e4).long()),
    ],
)
def test_masks_of_all_kinds(mask):
    model = encoder(batch_first=True)
    z = torch.randn(4, 12, 16).double()
    zs = []
    handle = attach(model, coeff=1)
    model(z)
    handle.mask = mask
    for layer in model.layers:
        zs.append(z := layer(z))
    close(handle.loss(), dispersion_losses(zs, valid=TOKENS).mean())


@pytest.mark.parametrize(
    ("name", "mask_of"),
    [
        ("attention_mask", additive),
        ("src_key_padding_mask", additive),
        ("src_key_padding_mask", lambda tokens: (~tokens).double()),
    ],
)
@pytest.mark.parametrize("tokens", [TOKENS, torch.ones_like(TOKENS)])
def test_floating_point_masks_of_the_model(name, mask_of, tokens):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = encoder(batch_first=True).layers

        def forward(self, z, **mask):
            for layer in self.layers:
                z = layer(z)
            return z

    handle = attach(model := Masked())
    z = torch.randn(4, 12, 16).double()
    mask = mask_of(tokens)
    model(z, **{name: mask})
    loss = handle.loss()
    model(z)
    handle.mask = tokens
    close(loss, handle.loss())
    model(z[:0], **{name: mask[:0]})
    assert handle.loss(torch.ones(0).double()) == 0


def test_a_decoder_of_torch():
    layer = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).double()
    z = torch.randn(4, 12, 16).double()
    memory = torch.randn(4, 5, 16).double()
    zs = []
    handle = attach(model, coeff=2)
    model(z, memory, tgt_key_padding_mask=~TOKENS)
    for layer in model.layers:
        zs.append(z := layer(z, memory, tgt_key_padding_mask=~TOKENS))
    close(handle.loss(), 2 * dispersion_losses(zs, valid=TOKENS).mean())


def test_the_parts_of_an_encoder_decoder():
    model = model_of("BartForConditionalGeneration")
    inputs = batch() | {"decoder_attention_mask": TOKENS.flip(0).long()}
    with attach(model.model.encoder) as encoder, attach(model.model.decoder) as decoder:
        out = model(**inputs, output_hidden_states=True)
        for handle, zs, valid in (
            (encoder, out.encoder_hidden_states, TOKENS),
            (decoder, out.decoder_hidden_states, TOKENS.flip(0)),
        ):
            close(handle.loss(), 0.1 * dispersion_losses(zs[1:], valid=valid).mean())


class OfDicts(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch, labels=None):
        return self.model(**batch, labels=labels)


def test_the_padding_of_a_dict():
    model = model_of("BertForMaskedLM")
    with attach(model) as handle:
        model(**batch())
        expected = handle.loss()
    handle = attach(model := OfDicts(model))
    inputs = batch()
    labels = inputs.pop("labels")
    model(UserDict(inputs), labels)
    close(handle.loss(), expected)


class Universal(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(lambda z: z)

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return x


def test_a_block_that_runs_several_times():
    """Each call counts as a layer."""
    model = model_of("AlbertForMaskedLM")
    with attach(model, "albert.encoder.albert_layer_groups", coeff=1) as handle:
        zs = model(**batch(), output_hidden_states=True).hidden_states[1:]
        losses = dispersion_losses(zs, valid=TOKENS)
        close(handle.loss(), losses.mean())
        close([*handle.losses.values()], [losses[-1].mean()])
    model = Universal().double()
    zs = [torch.randn(4, 12, 16).double()]
    handle = attach(model, ["block"], coeff=1)
    model(zs[0])
    for _ in range(3):
        zs.append(model.block(zs[-1]))
    close(handle.loss(), dispersion_losses(zs[1:]).mean())


@pytest.mark.parametrize(
    "change",
    [
        "checkpointed",
        "reentrant",
        "hooks checkpointed",
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_the_same_in_a_model_that_is(change):
    model = model_of("LlamaForCausalLM")
    handle = attach(model)
    expected = step(model, handle)
    if change == "compiled":  # with its hooks, it is still one graph
        model.compile(backend="aot_eager", fullgraph=True)
    elif change == "hooks checkpointed":  # an early stop would be before the hooks
        layers = [
            checkpoint_wrapper(layer, early_stop=False) for layer in model.model.layers
        ]
        model.model.layers = nn.ModuleList(layers)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": change == "reentrant"})
    # of transformers: hooks see no gradient
    old = "__call__" in vars(GradientCheckpointingLayer)
    if change == "reentrant" and old:
        with pytest.raises(
            RuntimeError, match="where blocks are checkpointed, set use_reentrant=False"
        ):
            step(model, handle)
        return
    close(step(model, handle), expected)
    assert not handle._outputs


def test_a_positional_mask_of_a_wrapped_model():
    """torch.compile's wrapper, like DDP's, takes any arguments; their names are those
    of the model within.
    """
    model = model_of("LlamaForCausalLM")
    given = batch()
    with attach(model) as handle:
        expected = step(model, handle)
    handle = attach(wrapped := torch.compile(model, backend="eager"))
    out = wrapped(given["input_ids"], given["attention_mask"], labels=given["labels"])
    close(backward(model, out.loss + handle.loss()), expected)


def test_accumulation_with_others_in_between():
    """Each forward has its own loss.

    What was generated, evaluated or forgotten in between counts for nothing.
    """
    model = model_of("GPT2LMHeadModel")
    parts = [batch(slice(0, 2)), batch(slice(2, 4))]
    handle = attach(model)
    expected = [
        sum(both)
        for both in zip(
            *(step(model, handle, **part)[1] for part in parts), strict=True
        )
    ]
    model(**parts[0])
    forgotten = weakref.ref(handle._outputs[0][1])
    for part in parts:
        out = model(**part)
        model.generate(parts[0]["input_ids"], max_new_tokens=2)  # without gradients
        model.eval()(**parts[0])
        model.train()
        (out.loss + handle.loss()).backward()
        assert forgotten() is None
    close([p.grad for p in model.parameters()], expected)
    with torch.no_grad():
        assert handle.loss() == 0


def test_a_batch_without_sequences():
    """The loss is 0, as that of sequences without pairs, and so is its gradient."""
    model = encoder(batch_first=True)
    handle = attach(model)
    model(torch.zeros(0, 12, 16).double())
    loss, gradients = backward(model, handle.loss())
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)
    assert [*handle.losses.values()] == [0, 0]


def test_copies_of_an_attached_model(tmp_path):
    """A copy has hooks of its own, and nothing that a forward has left."""
    model = encoder(batch_first=True)
    handle = attach(model)
    z = torch.randn(4, 12, 16).double()
    model(z)
    expected = handle.loss()
    model(z)  # its outputs are not leaves, which deepcopy refuses
    torch.save([model, handle], tmp_path / "model.pt")
    size = (tmp_path / "model.pt").stat().st_size
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    for copied, its_handle in (copy.deepcopy([model, handle]), saved):
        with pytest.raises(RuntimeError, match="call it after each forward"):
            its_handle.loss()
        copied(z)
        close(its_handle.loss(), expected)
        its_handle.detach()
        copied(z)
        assert not its_handle._outputs
    close(handle.loss(), expected)
    model(z.expand(100, 4, 12, 16).flatten(0, 1))
    torch.save([model, handle], tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size == pytest.approx(size, rel=0.1)


def test_a_forward_that_raises():
    """The loss must not be that of the blocks before the error, nor of an older
    forward; and nothing holds their outputs.
    """
    model = encoder(batch_first=True)
    handle = attach(model)
    z = torch.randn(4, 12, 16).double()
    model(z)
    expected = handle.loss()
    model(z)
    for _ in range(2):
        with (
            model.layers[1].register_forward_pre_hook(fail),
            pytest.raises(KeyError),
        ):
            model(z)
        assert not handle._outputs
        with torch.no_grad():
            model(z)
        with pytest.raises(RuntimeError, match="the last forward raised an error"):
            handle.loss()
    model(z)
    close(handle.loss(), expected)


def fail(*arguments):
    raise KeyError


class Block(nn.Linear):
    def __init__(self, returned):
        super().__init__(16, 16)
        self.returned = returned

    def forward(self, x):
        return self.returned(super().forward(x))


class Chain(nn.Module):
    """Two blocks.

    Args:
        returned: what a block returns, given its tensor.
        tensor_of: the tensor of what it returns.
    """

    def __init__(self, returned=lambda z: z, tensor_of=lambda z: z):
        super().__init__()
        self.layers = nn.ModuleList(Block(returned) for _ in range(2)).double()
        self.tensor_of = tensor_of

    def forward(self, x):
        for layer in self.layers:
            x = self.tensor_of(layer(x))
        return x


OUTPUTS = {
    "tensor": (lambda z: z, lambda z: z),
    "tuple": (lambda z: (z, z[..., :3]), lambda output: output[0]),
    "None first": (lambda z: (None, z), lambda output: output[1]),
    "dict": (
        lambda z: {"weights": z[:, None], "ids": z.long(), "z": z, "cache": None},
        lambda output: output["z"],
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_blocks(kind):
    model = Chain(*OUTPUTS[kind])
    z = torch.randn(4, 12, 16).double()
    zs = []
    handle = attach(model, coeff=1)
    model(z)
    for layer in model.layers:
        zs.append(z := model.tensor_of(layer(z)))
    close(handle.loss(), dispersion_losses(zs).mean())


@pytest.mark.parametrize("compiled", ["wrapped", "in place", "within a function"])
def test_attached_after_a_compiled_forward(compiled):
    """Dynamo does not notice that blocks, which had no hooks, have some now."""
    torch._dynamo.reset()
    model = Chain()
    z = torch.randn(4, 12, 16).double()
    with attach(model) as handle:
        model(z)
        expected = handle.loss()
    forward = model
    if compiled == "in place":
        model.compile(backend="eager")
    elif compiled == "wrapped":
        forward = torch.compile(model, backend="eager")
    else:
        forward = torch.compile(lambda x: model(x), backend="eager")
    forward(z)
    handle = attach(model if compiled == "within a function" else forward)
    forward(z)
    with pytest.raises(RuntimeError, match=re.escape("call torch._dynamo.reset()")):
        handle.loss()
    torch._dynamo.reset()
    forward(z)
    close(handle.loss(), expected)


def on_ranks():
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        model = model_of("LlamaForCausalLM")
        handle = attach(model)
        expected = step(model, handle)
        for part in (*model.model.layers, model) if wrap is fully_shard else [model]:
            wrapped = wrap(part)
        for _ in range(2):
            loss, gradients = step(
                wrapped, handle, **batch(slice(torch.distributed.get_rank(), None, 2))
            )
            torch.distributed.all_reduce(loss)
            close((loss / 2, gradients), expected)
            handle.detach()
            handle = attach(wrapped)


def test_two_ranks_equal_one_process():
    spawn(2, on_ranks)


def losses(
    name="BertForMaskedLM",
    change=nn.Module.train,
    mask=None,
    times=1,
    weights=None,
):
    handle = attach(model := change(model_of(name)))
    model(**batch())
    handle.mask = mask
    return [handle.loss(weights) for _ in range(times)]


def outputs(returned):
    attach(model := Chain(returned))
    model(torch.zeros(4, 12, 16).double())


def test_a_handle_names_its_blocks():
    handle = attach(encoder(batch_first=True), coeff=0.3, variant="cosine")
    assert repr(handle) == "<attach: layers.0, layers.1; coeff=0.3, variant='cosine'>"


def test_a_negative_lambda():
    model = encoder(batch_first=True)
    with pytest.warns(UserWarning, match="λ is -0.2, which is negative") as caught:
        handle = attach(model, coeff=-0.2)
    assert [warning.filename for warning in caught] == [__file__]
    z = torch.randn(4, 12, 16).double()
    model(z)
    loss = handle.loss()
    handle.coeff = 0.2
    model(z)
    close(loss, -handle.loss())


def swin():
    sizes = {"depths": [2, 3, 2], "num_heads": [2] * 3}
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, window_size=4, **sizes
    )
    return transformers.SwinModel(config).train()


def test_stages_of_blocks(recwarn):
    """Their default is named, and how to choose blocks. Other lists in blocks, as of
    norms or experts, are no reason for a warning.
    """
    model = swin()
    attach(model).detach()
    [warning] = [str(one.message) for one in recwarn if one.filename == __file__]
    assert "attach takes encoder.layers.0, encoder.layers.1, encoder.lay" in warning
    assert "name it, as in layers='encoder.layers.1.blocks'" in warning
    recwarn.clear()
    handle = attach(model, layers="encoder.layers.1.blocks")
    model(torch.randn(4, 3, 32, 32))
    assert handle.loss().isfinite()
    assert [*handle.losses] == [f"encoder.layers.1.blocks.{i}" for i in range(3)]
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    expert = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    block.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
    block.mlp = nn.ModuleDict({"experts": nn.ModuleList([expert, expert])})
    attach(nn.TransformerEncoder(block, 3, enable_nested_tensor=False))
    assert [one for one in recwarn if one.filename == __file__] == []


WRONG = {
    "model is a str, expected a torch.nn.Module: load it first": lambda: attach("gpt2"),
    "model is a type, expected a torch.nn.Module": lambda: attach(nn.Linear),
    "coeff is nan, expected a finite number": lambda: attach(encoder(), coeff=math.nan),
    "coeff is -inf, expected": lambda: attach(encoder(), coeff=-math.inf),
    "block layers.0 returns a dict of q [4, 12, 16] and k [4, 12, 16], expected a tensor": lambda: (
        outputs(lambda z: {"q": z, "k": z})
    ),
    "block layers.0 returns a dict of name str, expected": lambda: outputs(
        lambda z: {"name": "z"}
    ),
    "block layers.0 returns a tuple of NoneType, expected": lambda: outputs(
        lambda z: (None,)
    ),
    "block layers.0 returns a function, expected": lambda: outputs(lambda z: outputs),
    "Linear has no list of modules of one class, expected one": lambda: attach(
        nn.Linear(2, 2)
    ),
    "has no list of modules of one class, expected one list of blocks: name it, or the blocks, as in layers='blocks'": lambda: (
        attach(hybrid())
    ),
    "layers names no module, expected at least one": lambda: attach(encoder(), []),
    "unknown option 'tauu' (did you mean tau?)": lambda: attach(encoder(), tauu=1),
    "unknown option 'margin': pass options={'margin': …}": lambda: attach(
        encoder(), variant="simctg", margin=0.3
    ),
    "has 0.layers (2 modules) and 2.layers (2": lambda: attach(
        nn.ModuleList([encoder(), nn.ReLU(), encoder()])
    ),
    "as in attach(model.encoder) or attach(model.decoder)": lambda: attach(
        model_of("T5ForConditionalGeneration")
    ),
    # whose first sequence is sound
    "WhisperModel has two sequences": lambda: attach(
        transformers.WhisperModel(transformers.WhisperConfig(d_model=24))
    ),
    "as in attach(model.model.encoder) or attach(model.model.decoder)": lambda: attach(
        model_of("BartForConditionalGeneration")
    ),
    "as in layers='albert.encoder.albert_layer_groups'. A block that runs several": lambda: (
        attach(model_of("AlbertForMaskedLM"))
    ),
    "did you mean bert.encoder.layer": lambda: attach(
        model_of("BertForMaskedLM"), ["bert.encoder.layr"]
    ),
    "layers.0 has tokens as [N, B, F], expected [B, N, F]": lambda: attach(encoder()),
    "Transformer has two sequences: attach to a part of it, as in attach(model.encoder) or attach(model.decoder)": lambda: (
        attach(nn.Transformer(16, 2, 2, 2, 32, batch_first=True))
    ),
    "rnn has tokens as [N, B, F]": lambda: attach(
        nn.ModuleDict({"rnn": nn.LSTM(16, 16)}), "rnn"
    ),
    "layer.0 is [12, 4, 16], expected [B, N, F] for an input that begins with [4": lambda: (
        losses("XLNetLMHeadModel")
    ),
    # which would broadcast
    "weights is [4, 1], expected a tensor [4], one weight for each": lambda: losses(
        weights=torch.ones(4, 1)
    ),
    "weights is float, expected a tensor [4], one": lambda: losses(weights=0.1),
    "handle.mask is [4, 11], expected a tensor [4, 12]": lambda: losses(
        mask=TOKENS[:, 1:]
    ),
    "handle.mask is list, expected a tensor [4, 12]": lambda: losses(mask=[1]),
    "layers has an object of type float, expected names in model.named_modules(), such as 'layers.0'": lambda: (
        attach(encoder(), 0.1)
    ),
    "layers has an object of type TransformerEncoderLayer": lambda: attach(
        encoder(), encoder().layers
    ),
    "since the last loss(): call it after each forward of the attached model, in training mode (model.train())": lambda: (
        losses(change=nn.Module.eval)
    ),
    "no outputs of blocks since the last loss()": lambda: losses(times=2),
    "start one process per GPU": lambda: losses(
        change=nn.Module._replicate_for_data_parallel
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(message)):
        WRONG[message]()
