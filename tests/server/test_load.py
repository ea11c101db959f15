"""200 requests over HTTP to a real engine, many of which their clients give up: the others get their tokens, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.fake_engine import until
from support.helpers import abandoned_segments
from support.served import MODEL, Served, served
from support.tiny import Reference, check_clear_share, check_greedy

from distmk import LLM, SamplingParams

pytestmark = pytest.mark.timeout(120)
NUM_REQUESTS, MAX_LEN, VOCAB = 200, 96, 203
SLOTS = 16
PAGES = 2 * SLOTS  # of 16 tokens, a third of what the longest sequences of all slots need: some are put back


@dataclass
class Asked:
    """A request, and the tokens that its client saw. `leaves_s`, `leaves_at`: seconds or lines after which the client leaves."""

    prompt: list[int]
    num_tokens: int
    stream: bool
    leaves_s: float | None
    leaves_at: int | None
    tokens: list[int]
    left: bool = False


def drawn(source: random.Random) -> Asked:
    prompt = [source.randrange(VOCAB) for _ in range(source.randint(1, MAX_LEN // 2))]
    if source.random() < 0.3:  # begins as others do, whose keys and values may be cached
        prompt = [7] * 20 + prompt[:20]
    num_tokens = source.randint(1, MAX_LEN - len(prompt))
    kind = source.choice(["stay", "stay", "cancel", "disconnect"])
    leaves_s = source.uniform(0.0, 0.2) if kind == "cancel" else None
    leaves_at = source.randint(1, num_tokens) if kind == "disconnect" else None
    return Asked(prompt, num_tokens, kind == "disconnect" or source.random() < 0.5, leaves_s, leaves_at, [])


async def ask(client: httpx.AsyncClient, asked: Asked) -> None:
    body = {"model": MODEL, "prompt": asked.prompt, "max_tokens": asked.num_tokens, "temperature": 0}
    body |= {"stream": asked.stream, "return_token_ids": True}
    if not asked.stream:
        answer = (await client.post("/v1/completions", json=body)).json()
        asked.tokens = answer["choices"][0]["token_ids"]
        return
    num_lines = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            asked.tokens += [i for choice in json.loads(line[6:])["choices"] for i in choice["token_ids"]]
            num_lines += 1
            if num_lines == asked.leaves_at:
                asked.left = True
                return  # closes the connection


async def ask_all(server: Served, requests: list[Asked], source: random.Random) -> None:
    """About half of them at once, so that some wait for a slot."""

    async def one(client: httpx.AsyncClient, asked: Asked) -> None:
        async with room:
            await asyncio.sleep(source.uniform(0, 0.02))
            try:
                await asyncio.wait_for(ask(client, asked), asked.leaves_s)
            except asyncio.TimeoutError:
                asked.left = True

    room = asyncio.Semaphore(4 * SLOTS)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, asked) for asked in requests))


def children() -> set[str]:
    """The processes that this one has started and that live."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def check_slots_and_pages(llm: LLM) -> None:
    """As many sequences as there are slots run at once, on all pages: with one less, it would take twice the iterations."""
    before = llm.stats()
    params = SamplingParams(max_tokens=29, ignore_eos=True)
    outputs = llm.generate([[i, 1, 2] for i in range(SLOTS)], params)  # requests of one call begin together
    assert all(len(output.outputs[0].token_ids) == 29 for output in outputs)
    after = llm.stats()
    assert after.num_iterations - before.num_iterations < 50
    assert after.num_preemptions == before.num_preemptions


def check_prefixes(llm: LLM) -> None:
    """A prompt of two full pages finds both when it comes again. How many pages the requests above found depends on the machine:
    if all slots are always taken, a page is often gone by the time that a request which was offered it begins.
    """
    before = llm.stats().num_prefix_hits
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    cached = [llm.generate([[7] * 20 + [9] * 13], params)[0].num_cached_tokens for _ in range(2)]
    assert cached[1] == 32 and llm.stats().num_prefix_hits - before == sum(filter(None, cached)), cached


@pytest.mark.drawn(1)
@pytest.mark.whole
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_200_requests(num_ranks: int, tiny_model: Path, tiny_reference: Reference) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    requests = [drawn(source) for _ in range(NUM_REQUESTS)]
    segments, processes = set(abandoned_segments()), children()
    options = {"num_workers": 1, "max_model_len": MAX_LEN, "num_gpu_blocks_override": PAGES, "deadline_s": 20.0}
    llm = LLM(str(tiny_model), tensor_parallel_size=num_ranks, idle_exit_s=None, **options)  # type: ignore[arg-type]
    with served(llm) as server:
        asyncio.run(ask_all(server, requests, source))
        server.settled()
        check_prefixes(llm)
        check_slots_and_pages(llm)
        server.settled()
    num_left = sum(asked.left for asked in requests)
    assert NUM_REQUESTS / 8 < num_left < NUM_REQUESTS * 3 / 4, num_left
    clear = 0
    for asked in requests:
        assert asked.left or len(asked.tokens) == asked.num_tokens
        if asked.tokens:  # what came before its client left is right as well
            walk = check_greedy(tiny_reference, asked.prompt, asked.tokens, f"seed {seed}")
            clear += walk.clear_steps
    check_clear_share(clear, sum(len(asked.tokens) for asked in requests))
    until(lambda: children() <= processes and set(abandoned_segments()) <= segments)
