"""Parameters of vLLM's SamplingParams that distmk does not have."""

from __future__ import annotations

from collections.abc import Mapping

from distmk.absent_parameters import TUNES, Absent

IN_STRUCTURED_OUTPUTS = "structured_outputs=StructuredOutputsParams(json=schema) holds an answer to a form"
NO_BEAMS = "beam search does not exist; draw n completions, and compare their cumulative_logprob"

SAMPLING: Mapping[str, Absent] = {
    "best_of": Absent((1,), "ask for n completions, and compare their cumulative_logprob"),
    "use_beam_search": Absent((False,), NO_BEAMS),
    "length_penalty": Absent((1.0,), NO_BEAMS),
    "early_stopping": Absent((False,), NO_BEAMS),
    "bad_words": Absent(([],), "logit_bias with -100 keeps single tokens out"),
    "allowed_token_ids": Absent(([],), "logit_bias of up to 100 favours tokens"),
    "logits_processors": Absent(([],), "logit_bias and the penalties change logits"),
    **dict.fromkeys(("guided_decoding", "guided_json", "guided_regex"), Absent((), IN_STRUCTURED_OUTPUTS)),
    **dict.fromkeys(("guided_choice", "guided_grammar", "structural_tag"), Absent((), IN_STRUCTURED_OUTPUTS)),
    "guided_decoding_backend": TUNES,
    "guided_whitespace_pattern": Absent((), IN_STRUCTURED_OUTPUTS),
    "detokenize": Absent((True,), "LLM(..., skip_tokenizer_init=True) gives outputs without text"),
    "spaces_between_special_tokens": TUNES,  # of slow tokenizers, which there are not
    "truncate_prompt_tokens": Absent((), "shorten the token ids of the prompt"),
    "repetition_detection": Absent((), "repetition_penalty and frequency_penalty work against repetition"),
    "flat_logprobs": Absent((False,), "log probabilities are dicts by token id"),
    "logprob_token_ids": Absent(([],), "logprobs gives those of the most probable tokens"),
    "prompt_logprob_token_ids": Absent(([],), "prompt_logprobs gives those of the most probable tokens"),
    "prompt_logprob_start": Absent((0,), "prompt_logprobs gives those of all positions"),
    "trace_decode_token_ids": Absent(([],), "prompt_logprobs scores given tokens"),
    "routed_experts_prompt_start": TUNES,
    "skip_reading_prefix_cache": TUNES,
    "output_text_buffer_length": TUNES,
    "stream_interval": TUNES,
    "skip_clone": TUNES,
    "extra_args": Absent(({},)),
}
"""Parameters of vLLM's SamplingParams, now and in earlier versions."""
