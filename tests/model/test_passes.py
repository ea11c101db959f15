"""Compiler passes change how a model is computed, and not what: every pass alone, and all of them, against torch."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import torch
from support.evaluate import evaluate

from distmk import CausalLM, ModelConfig, Scores, UsageError, nn, register_model
from distmk.cli import main
from distmk.model.listing import drawing, listing
from distmk.model.nodes import Node, in_order
from distmk.model.passes import PASSES, compiled

EPS = 1e-6


class Drawn(CausalLM):
    """A model with every operator, in forms that `features` choose."""

    features: frozenset[str] = frozenset()

    def forward(self, tokens: Node) -> Node:
        c = self.config
        x = nn.embedding(tokens, "embed", c.vocab_size, c.hidden_size)
        x = x * 1.5 if "scales" in self.features else x
        for layer in range(c.num_layers):
            x = self.add(x, self.attention(self.normed(x, f"{layer}.in"), layer), f"{layer}.a")
            x = self.add(x, self.mlp(self.normed(x, f"{layer}.mid"), layer), f"{layer}.m")
        logits = nn.linear(self.normed(x, "out"), "head", c.vocab_size)
        return 0.25 * logits if "scales" in self.features else logits

    def normed(self, x: Node, name: str) -> Node:
        return nn.rms_norm(x, name, EPS, offset=float("offset" in self.features))

    def add(self, x: Node, y: Node, name: str) -> Node:
        y = self.normed(y, name) if "post_norms" in self.features else y
        return y + x if "reversed" in self.features else x + y

    def attention(self, x: Node, layer: int) -> Node:
        c, d = self.config, self.config.head_dim
        sizes, bias = [c.num_heads * d, c.num_kv_heads * d, c.num_kv_heads * d], "biases" in self.features
        if "joint" in self.features:
            q, k, v = nn.split(nn.linear(x, f"{layer}.qkv", sum(sizes), bias=bias), sizes)
        else:
            q, k, v = (nn.linear(x, f"{layer}.{n}", size, bias=bias) for n, size in zip("qkv", sizes, strict=True))
        if "qk_norm" in self.features:
            q, k = nn.head_norm(q, f"{layer}.qn", EPS, d), nn.head_norm(k, f"{layer}.kn", EPS, d, offset=1.0)
        if "rope" in self.features:
            q, k = nn.rope(q, d), nn.rope(k, d)
        out = nn.attention(q, k, v, d, window=3, scores=Scores(0.3, 5.0))
        out = nn.linear(out, f"{layer}.o", c.hidden_size, bias=bias, parallel="row")
        return out * 0.5 if "scales" in self.features else out

    def mlp(self, x: Node, layer: int) -> Node:
        n = self.config.intermediate_size
        if "joint" in self.features:
            gate, up = nn.split(nn.linear(x, f"{layer}.gate_up", 2 * n), [n, n])
        else:
            gate, up = nn.linear(x, f"{layer}.gate", n), nn.linear(x, f"{layer}.up", n)
        active = nn.gelu_tanh(gate) if "gelu" in self.features else nn.silu(gate)
        hidden = up * active if "reversed" in self.features else active * up
        return nn.linear(hidden, f"{layer}.down", self.config.hidden_size, parallel="row")


FEATURES = ("scales", "offset", "post_norms", "reversed", "biases", "joint", "qk_norm", "rope", "gelu")
CONFIG = ModelConfig(
    hidden_size=12,
    intermediate_size=10,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=23,
    max_position=64,
)
FUSED = {"Tokens", "Embedding", "Sum", "Linear", "FusedAttention", "Residual", "Gated"}


def kinds(output: Node) -> set[str]:
    return {node.kind for node in in_order(output)}


def drawn_model(rng: np.random.Generator) -> Drawn:
    model = Drawn(CONFIG)
    model.features = frozenset(name for name in FEATURES if rng.integers(2))
    print(sorted(model.features))
    return model


@pytest.mark.parametrize("name", [*PASSES, "all"])
def test_same_function(name: str, rng: np.random.Generator) -> None:
    """Of a pass behind those before it, with and without any that is skipped."""
    for _ in range(4):
        model = drawn_model(rng)
        torch.manual_seed(int(rng.integers(1 << 30)))
        weights = {key: torch.randn(shape, dtype=torch.float64) for key, shape in model.weights().items()}
        ids = torch.from_numpy(rng.integers(0, CONFIG.vocab_size, 6))
        before = model.logits()
        names = list(PASSES)
        later = [] if name == "all" else names[names.index(name) + 1 :]
        some = [other for other in names if other != name and rng.integers(4) == 0]
        wanted = evaluate(before, weights, ids)
        for skip in (later, later + some):
            after = compiled(before, skip)
            found = evaluate(after, weights, ids)
            wrong = torch.argwhere(~torch.isclose(found, wanted, rtol=1e-9, atol=1e-9))
            assert not len(wrong), f"skip {skip}: token, logit {wrong[:3].tolist()}\n" + "\n".join(listing(after))


def test_all_is_fused(rng: np.random.Generator) -> None:
    for _ in range(20):
        model = drawn_model(rng)
        found = kinds(compiled(model.logits()))
        assert found <= FUSED and {"FusedAttention", "Gated", "Sum"} <= found, found - FUSED


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("slice_matrices", "Slice"),
        ("fold_norms", "RmsNorm"),
        ("fold_scales", "Scale"),
        ("fuse_attention", "Attention"),
        ("fuse_gated", "Multiply"),
        ("place_sums", None),
        ("fuse_residual", "Add"),
    ],
)
def test_a_pass_does_its_part(name: str, made: str | None) -> None:
    """What it makes away with is there where it is skipped, and lowering refuses that in one line."""
    model = Drawn(CONFIG)
    model.features = frozenset(FEATURES) - {"biases", "post_norms"}
    assert made not in kinds(compiled(model.logits()))
    assert made is None or made in kinds(compiled(model.logits(), [name]))
    with pytest.raises(UsageError, match=r"no task computes \w+\(.*\) -> \d+ here; expected ") as error:
        model.compile(skip=[name])
    assert "\n" not in str(error.value)


def test_weights_of_a_model() -> None:
    model = Drawn(CONFIG)
    model.features = frozenset({"joint", "biases"})
    shapes = model.weights()
    assert (
        shapes["0.qkv.weight"] == (32, 12) and shapes["0.qkv.bias"] == (32,) and shapes["1.gate_up.weight"] == (20, 12)
    )
    assert shapes["embed.weight"] == (23, 12) and shapes["0.in.weight"] == (12,) and "0.q.weight" not in shapes


class Wrong(CausalLM):
    def forward(self, tokens: Node) -> Node:
        return WRONG[self.config.num_layers - 1](tokens)


def _x(tokens: Node) -> Node:
    return nn.embedding(tokens, "embed", 23, 12)


def _layer(tokens: Node, head_dim: int, v: Any = lambda x, head_dim: x, parallel: Any = "row") -> Node:
    """Attention and an MLP."""
    x = _x(tokens)
    q, k, value = (nn.linear(nn.rms_norm(x, "in", EPS), name, 12) for name in "qkv")
    out = nn.attention(nn.rope(q, head_dim), nn.rope(k, head_dim), v(value, head_dim), head_dim)
    x = x + nn.linear(out, "o", 12, parallel=parallel)
    gate, up = (nn.linear(nn.rms_norm(x, "post", EPS), name, 10) for name in ("gate", "up"))
    return x + nn.linear(nn.silu(gate) * up, "down", 12, parallel="row")


WRONG: list[Any] = [
    lambda t: nn.linear(_x(t), "head", 23),  # no norm
    lambda t: nn.linear(nn.rms_norm(_x(t), "n", EPS), "head", 24),
    lambda t: nn.linear(nn.rms_norm(_x(t), "n", EPS), "head", 23),  # no layers
    lambda t: nn.linear(nn.rms_norm(_x(t), "n", 1e-3), "head", 23),
    lambda t: nn.split(_x(t), [5, 6])[0],
    lambda t: nn.rope(_x(t), 5),
    lambda t: _x(t) + nn.linear(_x(t), "y", 11),
    lambda t: nn.attention(_x(t), nn.linear(_x(t), "k", 8), nn.linear(_x(t), "v", 8), 4),
    lambda t: nn.linear(_x(t), "y", 11, parallel="rows"),  # type: ignore[arg-type]
    lambda t: nn.softcap(_x(t), 0.0),
    lambda t: _x(t),
    lambda t: None,
    lambda t: nn.linear(nn.rms_norm(_x(t), "n", EPS), "head", 24 / 2),
    lambda t: nn.linear(nn.rms_norm(_x(t), None, EPS), "head", 23),
    lambda t: nn.linear(nn.rms_norm(_x(t), "n", "EPS"), "head", 23),
    lambda t: nn.linear(2.0, "head", 23),
    lambda t: nn.split(_x(t), 2)[0],
    lambda t: nn.split(_x(t), [16, -4])[0],
    lambda t: nn.rope(_x(t), 4, "other"),
    lambda t: nn.attention(_x(t), _x(t), _x(t), 4, window=0),
    lambda t: nn.attention(_x(t), _x(t), _x(t), 4, scores=Scores(softcap=math.nan)),
    lambda t: nn.attention(_x(t), _x(t), _x(t), 4, scores=Scores(-1)),
    lambda t: 1.0 + _x(t),
    lambda t: _x(t) * math.nan,
    lambda t: np.ones(12) * _x(t),
    lambda t: _x(t) - _x(t),
    lambda t: {}["a"],
    lambda t: nn.linear(nn.rms_norm(_layer(t, 6), "n", EPS), "head", 23),
    lambda t: nn.linear(nn.rms_norm(_layer(t, 4, v=nn.rope), "n", EPS), "head", 23),
    lambda t: nn.linear(nn.rms_norm(_layer(t, 4, parallel="column"), "n", EPS), "head", 23),
]
REASONS = [
    "expected a norm in front of the head",
    "the head has 24 tokens; the config calls for 23",
    "forward has 0 layers; its config says 3",
    "n has eps 0.001; the config's rms_norm_eps is 1e-06",
    r"split of 12 columns into \[5, 6\], which are 11",
    "rope of 12 columns, which are no whole number of heads of 5",
    "Embedding of 12 columns \\+ 11",
    "need equal divisors of q",
    "y: parallel is 'rows'; expected 'column' or 'row'",
    r"cap of softcap is 0.0; expected a positive number",
    "expected the head",
    "forward of Wrong returns None; return the logits",
    "a size of head is 12.0; expected a whole number",
    "the name of a rms_norm is None; expected a checkpoint's",
    "eps of n is 'EPS'; expected a positive number",
    "linear of 2.0; expected tokens, or what another operator returned",
    "split into 2; expected a list of sizes",
    "a size of split is -4; expected a whole number",
    "rope by the table 'other'; expected 'rope'",
    "window of attention is 0; expected a whole number",
    "the softcap of attention is nan; it must be a positive number",
    "the scale of attention is -1; it must be a positive number",
    r"Embedding of 12 columns \+ 1.0; two tensors",
    "a factor of Embedding is nan; expected a finite number",
    r"a factor of Embedding is array\(.*; expected a finite number",
    r"^test_passes.py:\d+: TypeError: unsupported operand type\(s\) for -",
    r"^test_passes.py:\d+: KeyError: 'a'",
    r"a head of attention of layer \d+ has 6 elements; the config calls for 4",
    r"no task computes Attention\(Rope, Rope, Rope, .* here; expected .* and v behind neither",
    r"no task computes Add\(Sum, Linear o\) .*, and what linears of parallel=\"row\" add to it",
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_mistakes(index: int) -> None:
    with pytest.raises(UsageError, match=REASONS[index]) as error:
        Wrong(ModelConfig(**(vars(CONFIG) | {"num_layers": index + 1}))).compile()
    assert "\n" not in str(error.value)


class Beside(Drawn):
    """Attention and MLP of the same tensor, side by side."""

    def forward(self, tokens: Node) -> Node:
        x = _x(tokens)
        normed = self.normed(x, "in")
        x = x + self.attention(normed, 0) + self.mlp(normed, 0)
        return nn.linear(self.normed(x, "out"), "head", 23)


class PartlyBiased(Drawn):
    """Attention whose queries alone have a bias."""

    def attention(self, x: Node, layer: int) -> Node:
        q, k, v = (nn.linear(x, name, size, bias=name == "q") for name, size in {"q": 16, "k": 8, "v": 8}.items())
        return nn.linear(nn.attention(q, k, v, 4), "o", 12, parallel="row")


class BiasedHead(Drawn):
    def forward(self, tokens: Node) -> Node:
        return nn.linear(self.normed(_x(tokens), "out"), "head", 23, bias=True)


class Twice(Drawn):
    """A norm of a norm, of which one is folded into the product."""

    def attention(self, x: Node, layer: int) -> Node:
        return super().attention(self.normed(x, "again"), layer)


@pytest.mark.parametrize(
    ("kind", "found", "expected"),
    [
        (Beside, "Sum", "the residual stream as it is there"),
        (Twice, r"RmsNorm\(Sum, norm=0.in\)", "the residual stream as it is there"),
        (PartlyBiased, "Linear", "a bias of every matrix or of none"),
        (BiasedHead, "Linear", "a head without a bias"),
    ],
)
def test_what_no_block_computes(kind: type[CausalLM], found: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"no task computes {found}.* here; expected {expected}"):
        kind(ModelConfig(**(vars(CONFIG) | {"num_layers": 1}))).compile()


def test_registering() -> None:
    """Two classes of a name are refused, and the same class again is not: a module may be imported again."""

    def make() -> type[CausalLM]:
        return register_model("OwnForCausalLM", "own")(type("Own", (CausalLM,), {}))

    first, again = make(), make()
    assert first is not again and again.family == "own"
    with pytest.raises(UsageError, match=r"Other: Own of \w+ is registered as OwnForCausalLM, .*already"):
        register_model("OwnForCausalLM")(type("Other", (CausalLM,), {}))
    with pytest.raises(UsageError, match="does not override forward"):
        again(CONFIG).compile()


def test_a_tensor_is_shown_without_its_inputs() -> None:
    """Which would double with each layer: a user's `print(x)` would not end."""
    assert repr(Drawn(CONFIG).logits()) == "Linear(matrices=head, parallel=column) -> 23"


def test_graph_command(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    """Each pass is shown, and what it changes; the drawing has every operator."""
    svg = f"{tmp_path}/graph.svg"
    assert main(["graph", "qwen3-0.6b", "--layers", "2", "--ranks", "2", "--workers", "3", "--svg", svg]) == 0
    text = capsys.readouterr().out
    stages = dict(re.findall(r"^(\S[^\n]*):\n((?:  [^\n]*\n)+)", text, re.MULTILINE))
    assert {"operators", *(f"after {name}" for name in PASSES)} <= set(stages), list(stages)
    assert stages["after slice_matrices"].strip() == "no change" and "HeadNorm" in stages["operators"]
    assert "FusedAttention(%3, head_dim=128" in stages["after fuse_residual"] and "lm_head" not in text
    slabs = stages["tasks of rank 0 in an iteration of up to 16 tokens"]
    assert re.search(r"layer1\.qkv +3 linear \(ahead\)", slabs) and "layer2" not in text
    drawn = ElementTree.parse(svg).getroot()
    boxes = drawn.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == stages["operators"].count("\n") + stages["after fuse_residual"].count("\n")
    assert (
        main(["graph", "qwen3-0.6b", "--skip", "fuse_gated"]) == 2 and main(["graph", "qwen3-0.6b", "--skip", "x"]) == 2
    )
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "no task computes Multiply" in told[0] and "there is no pass x; passes are" in told[1]


def test_drawing_is_escaped() -> None:
    text = drawing([("<&>", nn.embedding(Drawn(CONFIG).logits(), "a<b&c", 5, 7))])
    ElementTree.fromstring(text)
