"""Decode steps of the peers' model: eager, compiled, captured in a CUDA graph; and how long a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmark.exchange import Alone, Exchange
from benchmark.model import Attend, Model, Step
from benchmark.weights import Layer
from benchmark.work import Work

MODE = "max-autotune-no-cudagraphs"  # the whole step is captured in one graph, so compiled parts need no graphs
WARM_STEPS = 2
TOLERANCE = 2e-2  # for attention in bfloat16, relative to the largest output


def eager_step(model: Model, exchange: Exchange) -> Step:
    functions = model.functions
    return Step(
        model,
        exchange,
        embed=functions.embed,
        norm=functions.norm,
        project=functions.project,
        attend=_by(functions.attend, model),
        project_back_into=_into(functions.project_back),
        gated=functions.gated,
        best=functions.best,
        append=functions.append,
    )


def compiled_step(model: Model, exchange: Exchange, tell: Callable[[str], None]) -> Step:
    """Every part is compiled once, with weights as arguments, for all layers. Attention uses Triton if its kernels fit."""
    functions = model.functions

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, mode=MODE, fullgraph=True, dynamic=False)  # type: ignore[no-any-return]

    return Step(
        model,
        exchange,
        embed=compiled(functions.embed),
        norm=compiled(functions.norm),
        project=compiled(functions.project),
        attend=_triton_attend(model, tell) or _by(compiled(functions.attend), model),
        project_back_into=compiled(_into(functions.project_back)),
        gated=compiled(functions.gated),
        best=compiled(functions.best),
        append=compiled(functions.append),
    )


def _into(function: Callable[..., Tensor]) -> Callable[..., None]:
    """`function`, with the result written to a given tensor."""

    def run(out: Tensor, *arguments: Tensor) -> None:
        out.copy_(function(*arguments))

    return run


def _by(attend: Callable[..., Tensor], model: Model) -> Attend:
    rope, positions = model.weights.rope, model.positions

    def run(qkv: Tensor, layer: Layer, caches: tuple[Tensor, ...]) -> Tensor:
        return attend(qkv, positions[:, None], *caches, layer.q_norm, layer.k_norm, rope)

    return run


def _triton_attend(model: Model, tell: Callable[[str], None]) -> Attend | None:
    """Triton's attention. None, after a line with the reason, if there is no Triton or its kernels cannot do what
    `Functions.attend` does.
    """
    try:
        from benchmark.flash import FlashAttention

        flash = FlashAttention(model.functions.sizes, model.positions, model.weights.rope.shape[0])
        rope = model.weights.rope

        def run(qkv: Tensor, layer: Layer, caches: tuple[Tensor, ...]) -> Tensor:
            return flash(qkv, *caches, layer.q_norm, layer.k_norm, rope)

        _compare(model, run)
        return run
    except Exception as error:  # raised by the compiler or the driver: torch.compile can do it instead
        tell(f"attention is torch.compile's, not Triton's: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def _compare(model: Model, attend: Attend) -> None:
    """ValueError unless `attend` gives the same results with the first layer's caches as the model's own attention."""
    sizes, layer = model.functions.sizes, model.weights.layers[0]
    width = (sizes.num_q + 2 * sizes.num_kv) * sizes.head_dim
    qkv = torch.randn(len(model.positions), width, device=model.positions.device).to(layer.qkv.dtype)
    results = []
    for each in (_by(model.functions.attend, model), attend):
        caches = tuple(cache.clone() for cache in model.caches[0])
        results.append([each(qkv, layer, caches), *caches])
    for what, want, got in zip(("outputs", "keys", "values"), *results, strict=True):
        error = float((want.float() - got.float()).abs().max() / want.float().abs().max())
        if not error <= TOLERANCE:
            raise ValueError(f"its {what} are off by {error:.2g}")


def compile_parts(step: Step) -> None:
    """Run every part once without the other ranks, so that no rank waits in an all-reduce for one that compiles."""
    model, weights = step.model, step.model.weights
    state, caches = State(model), tuple(cache.clone() for cache in model.caches[0])
    x = step.embed(model.tokens, model.positions, weights.embedding)
    x = step.layer(x, weights.layers[0], caches, Alone(x))
    candidates = step.best(step.norm(x, weights.norm), weights.head)
    step.append(torch.stack([candidates] * step.exchange.num_ranks), model.tokens, model.positions)
    state.restore()
    synchronize(x.device)


def capture(step: Step) -> Callable[[], None]:
    """The step as one CUDA graph. The host only replays it."""
    state = State(step.model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    state.restore()
    graph = torch.cuda.CUDAGraph()
    # Threads of the process group may query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    torch.cuda.synchronize()
    return graph.replay


class State:
    """The positions of all sequences, to return to. Later steps write the same cache entries again."""

    def __init__(self, model: Model) -> None:
        self._model, self._tokens, self._positions = model, model.tokens.clone(), model.positions.clone()

    def restore(self) -> None:
        self._model.tokens.copy_(self._tokens)
        self._model.positions.copy_(self._positions)


def time_steps(run: Callable[[], None], model: Model, work: Work, tokens: int) -> tuple[list[float], list[list[int]]]:
    """Milliseconds per step of each repeat, over `tokens` steps beginning at `work.context`; and every sequence's new
    tokens.

    Before and after the call, every sequence ends with its prompt and first token.
    """
    device = model.tokens.device
    behind_prompts = State(model)
    for _ in range(work.untimed):
        run()
    state = State(model)
    times_ms = []
    for _ in range(work.repeats):
        state.restore()
        run()  # not timed: all ranks leave its all-reduces together
        synchronize(device)
        began = time.perf_counter()
        for _ in range(tokens):
            run()
        synchronize(device)
        times_ms.append(1e3 * (time.perf_counter() - began) / tokens)
    first, last = len(work.prompts[0]), work.context + tokens
    new = model.tokens[:, first : last + 1].tolist()
    behind_prompts.restore()
    return times_ms, new


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
