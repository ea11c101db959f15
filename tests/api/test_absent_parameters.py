"""The first script of a vLLM user: arguments that ask for nothing are taken, others are one line that says what exists."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_model import write_chat_model, write_tokenizer

from distmk import LLM, SamplingParams
from distmk.api.absent_arguments import METHODS
from distmk.engine.absent_sampling import SAMPLING
from distmk.errors import ModelError, UsageError

IDS = [[1, 2, 3]]
NEUTRAL_LLM: dict[str, Any] = {
    **{"enforce_eager": True, "max_seq_len_to_capture": 8192, "disable_custom_all_reduce": True, "swap_space": 4},
    **{
        "dtype": "bfloat16",
        "quantization": None,
        "trust_remote_code": True,
        "tokenizer_mode": "auto",
        "revision": None,
    },
    **{"tokenizer_revision": None, "cpu_offload_gb": 0, "distributed_executor_backend": "mp", "block_size": 16},
    **{"enable_chunked_prefill": True, "kv_cache_dtype": "auto", "disable_log_stats": True, "hf_overrides": None},
    **{"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_lora": False, "max_lora_rank": 16},
    **{"speculative_config": None, "compilation_config": {"level": 3}, "async_scheduling": True, "task": "generate"},
    **{"runner": "auto", "convert": "auto", "limit_mm_per_prompt": {"image": 0}, "allowed_local_media_path": ""},
    **{"mm_processor_kwargs": None, "override_pooler_config": None, "hf_token": None, "enable_sleep_mode": False},
    **{"scheduling_policy": "fcfs", "max_logprobs": 20, "load_format": "safetensors", "download_dir": None},
    **{"disable_sliding_window": False, "config_format": "auto", "model_impl": "auto", "served_model_name": "m"},
}
REFUSED_LLM = [
    ("dtype", "float16", "weights and the KV cache are bfloat16"),
    ("dtype", torch.float16, "weights and the KV cache are bfloat16"),
    ("enable_lora", True, "merge the adapter"),
    ("num_speculative_tokens", 3, "speculative_config has"),
    ("pipeline_parallel_size", 2, "tensor_parallel_size"),
    ("tokenizer_mode", "slow", "tokenizers library"),
    ("task", "embed", "generates text"),
    ("block_size", 32, "16 tokens"),
]


class Kind(Enum):
    CUMULATIVE = 0


NEUTRAL_SAMPLING: dict[str, Any] = {
    **{"best_of": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False, "bad_words": []},
    **{"allowed_token_ids": None, "logits_processors": None, "guided_decoding": None, "structured_outputs": None},
    **{"detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": False},
    **{"truncate_prompt_tokens": None, "output_kind": Kind.CUMULATIVE, "extra_args": {}},
}
REFUSED_SAMPLING = [
    ("best_of", 2, "ask for n"),
    ("bad_words", ["a"], "logit_bias"),
    ("logits_processors", [print], "logit_bias"),
    ("use_beam_search", True, "beam search does not exist"),
    ("guided_json", {}, "structured_outputs=StructuredOutputsParams"),
]


def test_arguments_of_an_llm(tiny_model: Path) -> None:
    """All at once: they change no token."""
    with LLM(str(tiny_model), num_workers=1) as llm:
        expected = llm.generate(IDS, SamplingParams())[0].outputs[0].token_ids
    with LLM(str(tiny_model), num_workers=1, **NEUTRAL_LLM) as llm:
        output = llm.generate(IDS, SamplingParams(**NEUTRAL_SAMPLING), lora_request=None, priority=None)[0].outputs[0]
        for arguments, says in (
            ({"lora_request": object()}, "lora_request is .*merge the adapter"),
            ({"lora_reqest": None}, "generate has no parameter 'lora_reqest'; did you mean lora_request"),
        ):
            with pytest.raises(UsageError, match=says):
                llm.generate(IDS, **arguments)
        for name in METHODS:
            assert not hasattr(llm, name)
            with pytest.raises(UsageError, match=rf"LLM\.{name} of vLLM does not exist here; \w"):
                getattr(llm, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            llm.nothing  # noqa: B018
    assert output.token_ids == expected


@pytest.mark.parametrize(("name", "value", "says"), REFUSED_LLM, ids=[name for name, *_ in REFUSED_LLM])
def test_an_argument_that_asks_for_something(name: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is .*, which distmk does not support; .*{says}"):
        LLM("/nowhere", **{name: value})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("tensor_paralel_size", "tensor_parallel_size"), ("enforce_eagre", "enforce_eager"), ("max_seqs", "max_num_seqs")],
)
def test_an_unknown_argument(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match=f"^LLM has no parameter '{wrong}'; did you mean {right}"):
        LLM("/nowhere", **{wrong: 1})


@pytest.mark.parametrize(("name", "value", "says"), REFUSED_SAMPLING, ids=[name for name, *_ in REFUSED_SAMPLING])
def test_a_sampling_parameter_that_asks_for_something(name: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is .*, which distmk does not support; .*{says}"):
        SamplingParams(**{name: value})
    params = SamplingParams()
    with pytest.raises(UsageError, match=f"^{name} is .*{says}"):
        setattr(params, name, value)
    setattr(params, name, None)


def test_sampling_parameters_change(tiny_model: Path) -> None:
    """They are checked at use, and what was submitted before keeps its values."""
    params = SamplingParams(max_tokens=5, stop_token_ids=[7], logit_bias={3: 1.0})
    copied = params.clone()
    assert copied == params == pickle.loads(pickle.dumps(params)) and copied is not params
    copied.stop_token_ids.append(8)
    assert params.stop_token_ids == [7]
    with pytest.raises(AttributeError, match="no parameter 'temprature'; did you mean temperature"):
        params.temprature = 1.0  # type: ignore[attr-defined]
    with LLM(str(tiny_model), num_workers=1) as llm:
        (request,) = llm.make_requests(IDS, params)
        params.max_tokens, params.stop_token_ids = 9, []
        params.stop_token_ids.append(100_000)
        assert (request.params.max_tokens, request.params.stop_token_ids) == (5, [7])
        assert len(llm.generate(IDS, SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids) == 9
        params.temperature = -1.0
        with pytest.raises(UsageError, match=r"^temperature is -1\.0; expected 0 to"):
            llm.generate(IDS, params)


def test_none_asks_for_nothing() -> None:
    assert SamplingParams(**dict.fromkeys(SAMPLING)) == SamplingParams()


def test_another_tokenizer(tmp_path: Path) -> None:
    """It reads prompts, writes text, has its own chat template, and its end token ends answers."""
    model = write_chat_model(tmp_path / "model", "{{ messages[0].content }}")
    other = write_tokenizer(tmp_path / "other", "Q: {{ messages[0].content }} A:", eos_token="<|im_end|>")
    for file in model.glob("tokenizer*"):
        file.unlink()
    with LLM(str(model), num_workers=1) as llm, pytest.raises(UsageError, match="no tokenizer"):
        llm.generate("abc")
    with LLM(str(model), num_workers=1, tokenizer=str(other)) as llm:
        (output,) = llm.generate("abc", SamplingParams(max_tokens=3, logit_bias={65: 100}))
        assert (output.prompt_token_ids, output.outputs[0].text) == ([256, 97, 98, 99], "AAA")
        assert bytes(llm.render_chat([{"role": "user", "content": "b"}])) == b"Q: b A:"
        ended = llm.generate("abc", SamplingParams(max_tokens=3, logit_bias={259: 100}))[0].outputs[0]
        assert (ended.token_ids, ended.finish_reason) == ([259], "stop")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty: has no tokenizer\.json"):
        LLM(str(model), num_workers=1, tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ModelError, match=r"nowhere: no such file or folder; a tokenizer is a folder with"):
        LLM(str(model), num_workers=1, tokenizer="/nowhere")
