"""Stop strings of an LLM: the text ends in front of one, the sequence leaves the launch, and others go on."""

from __future__ import annotations

from pathlib import Path

from support.fake_engine import until

from distmk import LLM, SamplingParams

PROMPTS = ["Gravity is", "The sky is blue because"]


def test_stop_strings(smollm2: Path) -> None:
    with LLM(str(smollm2), num_workers=1, max_model_len=256, idle_exit_s=5.0) as llm:
        whole = [output.outputs[0] for output in llm.generate(PROMPTS, SamplingParams(max_tokens=48, ignore_eos=True))]
        texts = [output.text for output in whole]
        stop = texts[0][40:47]  # in the midst of words
        assert stop not in texts[1]
        params = SamplingParams(max_tokens=200, ignore_eos=True, stop=[stop, "never met"])
        other = SamplingParams(max_tokens=48, ignore_eos=True, stop=["never met"])
        stopped, free = (output.outputs[0] for output in llm.generate(PROMPTS, [params, other]))
        assert stopped.text == texts[0][: texts[0].index(stop)]
        assert stopped.finish_reason == "stop" and len(stopped.token_ids) < 48
        assert stopped.token_ids == whole[0].token_ids[: len(stopped.token_ids)]
        assert (free.text, free.token_ids, free.finish_reason) == (texts[1], whole[1].token_ids, "length")
        pieces = [output.text for output in llm.stream(PROMPTS[0], params)]
        assert "".join(pieces) == stopped.text
        until(lambda: llm.stats().num_running == llm.stats().num_waiting == 0)
        stats = llm.stats()
        assert stats.num_free_kv_pages == stats.num_kv_pages
        # Far fewer than the 400 that the stopped sequences asked for: the launch was told.
        assert stats.num_generated_tokens < 4 * 48 + 2 * 48
        assert (
            stats.iteration_ms > 0
            and stats.num_prompt_tokens == sum(len(llm.tokenizer.encode(p)) for p in PROMPTS) * 2 + 3
        )
        include = SamplingParams(max_tokens=200, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
        assert llm.generate(PROMPTS[0], include)[0].outputs[0].text == stopped.text + stop
