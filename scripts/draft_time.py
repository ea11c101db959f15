#!/usr/bin/env python
"""Tokens a second with drafts and without, taking turns, where answers quote their prompt and where they do not.

    python scripts/draft_time.py .models/SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/draft_time.py MODEL --config '{"method": "suffix"}' --batch 4

Prints one JSON object: for each kind of text the median over --repeats of tokens a second without and with drafts, with the
lowest and the highest, their ratio, and the tokens that a row of drafts gives. All answers are greedy and equally long.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from typing import Any

from distmk import LLM, SamplingParams
from distmk.cli.exit_status import run_main

ARTICLE = """The lighthouse at Ardmore Point was built in 1853 by Alan Stevenson, who had by then finished eleven other towers
on the western coast. It stands forty metres above the water on a shelf of black basalt, and its lamp could be seen from twenty
miles away in clear weather. For a century three keepers and their families lived beside it. They grew potatoes behind a wall of
dry stone, kept two cows, and rowed to the village once a week for flour, oil and letters. In the winter of 1894 a storm broke
the glass of the lantern room, and the keepers held sailcloth over the opening for nine hours so that the flame would not go out.
The lamp was changed to electricity in 1962, and in 1986 the last keeper locked the door and handed the key to the harbour
office. Since then a computer in Edinburgh has switched the light on at dusk and off at dawn. The cottages are now rented to
visitors, and the garden wall is the home of a colony of stoats."""
KINDS = {
    "quote": [
        f"{ARTICLE}\n\nRepeat the text above.",
        f"Repeat this text word for word:\n\n{ARTICLE}",
    ],
    "free": [
        "Tell me a story about a dragon who learns to cook.",
        "Explain how photosynthesis works, in your own words.",
    ],
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="an instruct model's folder or file")
    parser.add_argument(
        "--config",
        type=json.loads,
        default={"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        metavar="JSON",
        help="speculative_config (default: ngram, 8 tokens, matches of 2 to 4)",
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of the rank (default: one a core)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="times to time them (default 5)")
    return parser.parse_args()


def tokens_per_s(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Of one launch, from the first token of all sequences on."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    requests = llm.make_requests(prompts, params)
    for _ in llm.run(requests):
        pass
    first_s = max(request.first_s for request in requests)
    num_left = sum(len(request.token_ids) - 1 for request in requests)
    return num_left / (max(request.last_s for request in requests) - first_s)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "min": round(min(values), 1), "max": round(max(values), 1)}


def main() -> int:
    arguments = parse()
    options: dict[str, Any] = {"backend": arguments.backend, "max_model_len": 2048, "enable_prefix_caching": False}
    options |= {"num_workers": arguments.workers}
    result = {}
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(arguments.model, **options))
        drafting = stack.enter_context(LLM(arguments.model, speculative_config=arguments.config, **options))
        assert plain.tokenizer is not None
        for kind, texts in KINDS.items():
            chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(arguments.batch)]
            prompts = [output.prompt_token_ids for output in plain.chat(chats, SamplingParams(max_tokens=1))]
            found: dict[str, list[float]] = {"plain": [], "drafts": []}
            before = drafting.stats().drafts
            for _ in range(arguments.repeats):
                for name, llm in (("plain", plain), ("drafts", drafting)):
                    found[name].append(tokens_per_s(llm, prompts, arguments.tokens))
            after = drafting.stats().drafts
            assert before is not None and after is not None
            num = after.num_drafts - before.num_drafts
            accepted = sum(after.num_accepted) - sum(before.num_accepted)
            ratios = [
                with_drafts / without for with_drafts, without in zip(found["drafts"], found["plain"], strict=True)
            ]
            result[kind] = {
                **{name: spread(values) for name, values in found.items()},
                "ratio": round(statistics.median(ratios), 3),
                "drafted_rows": num,
                "draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
                "accepted": accepted,
            }
    print(json.dumps({"model": arguments.model, "batch": arguments.batch, "config": arguments.config, "kinds": result}))
    return 0


if __name__ == "__main__":
    run_main(main)
