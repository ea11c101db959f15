"""/metrics, /stats and /version: what a server and its engine have done."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import FakeEngine, until
from support.served import MODEL, Served, served
from support.yardstick import slowness

import distmk
from distmk.api.outputs import DraftStats, EngineStats
from distmk.server.metrics import Metrics


def samples(server: Served) -> dict[str, float]:
    """The value of every sample of /metrics; those with a label of their own under name/label."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL and sample.labels.pop("engine") == "0"
            found["/".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def test_metrics() -> None:
    """Under vLLM's names: counts of tokens and requests, times, and what runs and waits now."""
    with served(FakeEngine(tick_s=0.01, max_num_seqs=2)) as server:
        body = {"model": MODEL, "prompt": "the cat", "max_tokens": 10, "ignore_eos": True}
        for more in ({}, {"n": 2}, {"stream": True}):
            assert server.http.post("/v1/completions", json={**body, **more}).status_code == 200
        stop = {"logit_bias": {}, "stop": [" "], "max_tokens": 50}
        assert server.http.post("/v1/completions", json={**body, **stop}).status_code == 200
        found = samples(server)
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
            assert found[f"vllm:{name}_count"] == 5, name
        assert found["vllm:request_prompt_tokens_count"] == 4 and found["vllm:request_prompt_tokens_sum"] == 4 * 4
        assert found["vllm:request_params_n_sum"] == 5
        assert found["vllm:inter_token_latency_seconds_count"] >= 4 * 9
        mean_s = found["vllm:inter_token_latency_seconds_sum"] / found["vllm:inter_token_latency_seconds_count"]
        assert 0.005 < mean_s < 0.1 * slowness()
        assert found["vllm:request_success_total/length"] == 4 and found["vllm:request_success_total/stop"] == 1
        assert found["vllm:prompt_tokens_total"] == 5 * 4 and found["vllm:generation_tokens_total"] >= 41
        assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
        assert found["distmk:oldest_waiting_request_age_seconds"] == 0

        with server.http.stream(
            "POST", "/v1/completions", json={**body, "n": 5, "max_tokens": 500, "stream": True}
        ) as answer:
            lines = answer.iter_lines()  # which closes the connection when it is dropped
            next(lines)
            until(lambda: server.engine.stats().num_running == 2)
            found, stats = samples(server), server.http.get("/stats").json()
            assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 3)
            assert 0 < found["vllm:kv_cache_usage_perc"] < 1
            first_s, later_s = (one["distmk:oldest_waiting_request_age_seconds"] for one in (found, samples(server)))
            assert 0 < first_s < later_s == pytest.approx(server.http.get("/stats").json()["oldest_waiting_s"], abs=1)
            assert (stats["num_running"], stats["num_waiting"], stats["model"]) == (2, 3, MODEL)
            assert 0 < stats["num_free_kv_pages"] < stats["num_kv_pages"]
        server.settled()
        assert samples(server)["vllm:request_success_total/abort"] == 5
        assert server.http.get("/version").json() == {"version": distmk.__version__}


def test_metrics_of_drafts() -> None:
    """Under vLLM's names, and accepted drafts by their place."""
    drafts = DraftStats(5, 17, (4, 2, 1, *[0] * 12))
    stats = EngineStats(1, 0, 10, 5, 100, 1.0, 3, 40, 0, 0, drafts=drafts)
    text = Metrics(MODEL, lambda: stats).text().decode()
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["vllm:spec_decode_num_drafts_total", None] == 5
    assert found["vllm:spec_decode_num_draft_tokens_total", None] == 17
    assert found["vllm:spec_decode_num_accepted_tokens_total", None] == 7
    by_place = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place)] for place in range(15)]
    assert by_place == [4, 2, 1, *[0] * 12]
