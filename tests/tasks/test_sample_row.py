"""Sampling by itself: draws by `sample_row` have the distribution of torch's softmax, for each parameter, and logprobs are right.

python -m pytest -q tests/tasks/test_sample_row.py                     # all backends that this machine has
DISTMK_TEST_SEED=7 python -m pytest -q tests/tasks/test_sample_row.py  # the logits and draws of one run again
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import Runner
from support.machine import command, on, require, run_job
from support.race import philox, race_scores
from support.sampling_board import SamplingBoard, empty_case, make_slot
from support.sampling_cases import VOCAB, Case, distribution, make_cases, p_value

import distmk
from distmk.abi import COUNT_IN_PROMPT, MAX_ROWS, Batch, BatchRow, RowSample, SlotSampling
from distmk.tasks import CountTokens

JOB = Path(__file__).with_name("sample_row_job.py")
SEED = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))
DRAWS = {"host": 40_000, "emulated": 64, "cuda": 100_000}
LEAST_P = 1e-6


def draw(runner: Runner, backend: str, num_draws: int, num_sections: int) -> dict[str, Any]:
    print(f"repeat with DISTMK_TEST_SEED={SEED}")
    arguments = (backend, str(SEED), str(num_draws), str(num_sections))
    found: dict[str, Any] = run_job(runner, command(JOB, *arguments)).objects()[0]
    return found


RUNS = [on("host", 2), on("emulated", 1), *(on("cuda", n) for n in (1, 2))]


@pytest.mark.drawn(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "num_sections"), RUNS)
def test_draws_have_the_distribution(runner: Runner, backend: str, num_sections: int) -> None:
    """Pearson's chi-square for every case, at as many positions as draws. Draws at two positions, and with two seeds, are
    independent. A second time with another division of the vocabulary and on the host, the same tokens come out.
    """
    require(backend)
    found = draw(runner, backend, DRAWS[backend], num_sections)
    cases = make_cases(np.random.default_rng(SEED))
    for case, counts in zip(cases, found["counts"], strict=True):
        p = p_value(np.array(counts), distribution(case))
        assert p > LEAST_P, f"{case.name}: p = {p}"
    check_independence({case.name: case for case in cases}, found["paired"])
    for index, (case, tokens) in enumerate(zip(cases, found["first"], strict=True)):
        check_race(case, SEED + index, tokens)
    for case, record, tokens in zip(cases, found["records"], found["first"], strict=True):
        check_record(case, record, tokens[0])
    again = draw(runner, "host", 64, 3 - num_sections)
    same = np.array(found["first"])[:, :16] == np.array(again["first"])[:, :16]
    assert same.mean() > (0.99 if backend == "cuda" else 0.999), f"{(~same).sum()} other tokens"


def check_independence(cases: dict[str, Case], paired: dict[str, list[int]]) -> None:
    """The joint distribution of two draws is the product of theirs."""
    (one, ones), (other, others) = ((cases[name], np.array(tokens)) for name, tokens in paired.items())
    pairs = {f"of one seed, {lag} apart": (one, one, ones[:-lag], ones[lag:]) for lag in (1, 2, 4)}
    pairs["of two seeds"] = (one, other, ones, others)
    for name, (first, second, firsts, seconds) in pairs.items():
        counts = np.zeros((VOCAB, VOCAB), int)
        np.add.at(counts, (firsts, seconds), 1)
        joint = torch.outer(distribution(first), distribution(second)).reshape(-1)
        assert (p := p_value(counts.reshape(-1), joint)) > LEAST_P, f"two draws {name}: p = {p}"


def check_race(case: Case, seed: int, tokens: list[int]) -> None:
    """Every draw is the token that wins the race, or one whose score equals its score up to rounding."""
    probs = distribution(case)
    for position, token in enumerate(tokens):
        scores = race_scores(probs, seed, position)
        assert scores[token] > scores.max() - 1e-4, f"{case.name}: {token} at {position}, expected {scores.argmax()}"


def check_record(case: Case, record: dict[str, Any], token: int) -> None:
    """The model's own logprobs, whatever the parameters."""
    logits = case.logits.nan_to_num(nan=-torch.inf)
    want = logits.log_softmax(0)
    assert record["token"] == token and abs(record["logprob"] - want[token].item()) < 2e-5, case.name
    assert record["rank"] == int((logits >= logits[token]).sum()), case.name
    order = sorted(range(VOCAB), key=lambda each: (-logits[each].item(), each))[: record["num"]]
    assert record["num"] >= 5 and record["tokens"][: record["num"]] == order, case.name
    assert np.allclose(record["logprobs"][: record["num"]], want[order].numpy(), atol=2e-5), case.name


def run_once(
    cases: list[Case], sample: RowSample = RowSample.DRAW, vocab: int = VOCAB, **slot: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and records of 8 positions of each case, on the host; [positions, cases]."""
    board = SamplingBoard(vocab, 2, 8, 1)
    filled = [*cases, *[empty_case(vocab)] * (MAX_ROWS - len(cases))]
    with distmk.connect(1) as bootstrap, distmk.Session(board.graph, bootstrap, backend="host") as session:
        board.fill(session, filled, [make_slot(case, SEED + i, **slot) for i, case in enumerate(filled)])
        board.run(session, 0, sample, len(cases))
        return board.tokens_drawn(session)[:, : len(cases)], board.records_of(session)[:, : len(cases)]


def test_philox() -> None:
    """The generator of the oracle, by the known answers that Random123 comes with."""
    known = {
        (0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0xFFFFFFFF,) * 4 + (0xFFFFFFFFFFFFFFFF,): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0x299F31D0A4093822): (
            *(0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    }
    for (*counter, key), want in known.items():
        assert tuple(philox(np.array(counter, np.uint32), key).tolist()) == want


@pytest.mark.whole
@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 2000, "min_p": 1e-4}], ids=str)
def test_small_changes_seldom_change_a_token(parameters: dict[str, Any]) -> None:
    """Logits that differ by less than 0.004 of total variation on average give other tokens in at most 2 % of the draws."""
    rng, vocab, num_batches = np.random.default_rng(SEED), 5003, 128
    before = [torch.from_numpy(rng.normal(0, 2, vocab).astype(np.float32)) for _ in range(MAX_ROWS)]
    after = [logits + torch.from_numpy(rng.normal(0, 0.009, vocab).astype(np.float32)) for logits in before]
    change = [
        0.5 * (a.double().softmax(0) - b.double().softmax(0)).abs().sum() for a, b in zip(before, after, strict=True)
    ]
    assert 0.001 < sum(change) / len(change) < 0.004
    board, tokens = SamplingBoard(vocab, 3, num_batches, 1), []
    with distmk.connect(1) as bootstrap, distmk.Session(board.graph, bootstrap, backend="host") as session:
        for rows in (before, after):
            cases = [Case("", logits, **parameters) for logits in rows]
            board.fill(session, cases, [make_slot(case, SEED) for case in cases])
            board.run(session, 0)
            tokens.append(board.tokens_drawn(session))
    changed = (tokens[0] != tokens[1]).mean()
    assert changed <= 0.02, f"{changed:.2%} of {tokens[0].size} draws changed"
    assert len(np.unique(tokens[0])) > 30


def test_extremes() -> None:
    """Nothing but the best token where nothing else is left; any token where all are alike."""
    logits = torch.from_numpy(np.random.default_rng(SEED).normal(0, 2, VOCAB).astype(np.float32))
    best = int(logits.argmax())
    alone, nan = torch.full((VOCAB,), -torch.inf), torch.full((VOCAB,), torch.nan)
    alone[41] = -5.0
    infinite = logits.clone()
    infinite[17] = torch.inf
    cases = [
        (Case("one", alone), {41}),
        (Case("NaN", nan), {0}),
        (Case("infinite", infinite), {17}),
        (Case("cold", logits, temperature=1e-4), {best}),
        (Case("temperature 0", logits, temperature=0.0), {best}),
        (Case("top_k 1", logits, temperature=2.0, top_k=1), {best}),
        (Case("top_p near 0", logits, temperature=2.0, top_p=1e-9), {best}),
        (Case("min_p 1", logits, temperature=2.0, min_p=1.0), {best}),
        (Case("all equal", torch.zeros(VOCAB), top_k=3), {0, 1, 2}),
        (
            Case("all banned but one", logits, banned=tuple(set(range(VOCAB)) - {99} - {*range(20)}), top_k=VOCAB + 9),
            None,
        ),
        (Case("one allowed", logits, allowed=(102,), bias={102: -100.0}), {102}),
    ]
    tokens, _ = run_once([case for case, _ in cases])
    for (case, allowed), drawn in zip(cases, tokens.T, strict=True):
        possible = {int(i) for i in np.flatnonzero(distribution(replace(case, temperature=1.0)).numpy())}
        assert {*drawn.tolist()} <= (allowed if allowed is not None else possible), f"{case.name}: {drawn}"


@pytest.mark.parametrize("vocab", [2, 3, 5003, 20_001])
def test_many_equal_logits(vocab: int) -> None:
    """More tokens than a list holds, in one bin, are divided until the last one that is kept is found."""
    rng = np.random.default_rng(SEED)
    flat, near = torch.zeros(vocab), torch.from_numpy(rng.uniform(0, 1e-3, vocab).astype(np.float32))
    kept = max(1, vocab // 2)
    cases = [Case("flat", flat, top_k=kept), Case("near", near, top_k=kept), Case("share", flat, top_p=0.5)]
    tokens, _ = run_once(cases, vocab=vocab)
    assert (tokens[:, [0, 2]] < kept + 1).all(), tokens
    best = set(near.sort(descending=True, stable=True).indices[:kept].tolist())
    assert {*tokens[:, 1].tolist()} <= best


def test_scored_rows() -> None:
    """A row of a prompt reports the prompt's next token, and draws nothing."""
    case = make_cases(np.random.default_rng(SEED))[0]
    board = SamplingBoard(VOCAB, 1, 2, 1)
    prompt = np.array([3, 77, 102, 5], np.int32)
    with distmk.connect(1) as bootstrap, distmk.Session(board.graph, bootstrap, backend="host") as session:
        session.view(board.tables)[0, : prompt.nbytes] = prompt.view(np.uint8)
        session.view(board.drawn)[:] = 0xFF
        slots = [make_slot(case, 1, num_prompt_logprobs=6)] * MAX_ROWS
        slots[0].prompt_len = len(prompt)
        slots[0].tokens = session.program.placement.operand(board.tables.at(0))
        board.fill(session, [replace(case, bias={})] * MAX_ROWS, slots)
        session.view(board.tables)[0, : prompt.nbytes] = prompt.view(np.uint8)
        board.run(session, 1, RowSample.SCORE, 1)
        assert (board.tokens_drawn(session) == -1).all()
        for position, record in enumerate(board.records_of(session)[:, 0], 1):
            fields = {name: record[name].tolist() for name in record.dtype.names}
            check_record(case, fields, int(prompt[position + 1]))


def test_tokens_are_counted() -> None:
    """The prompt's and the output's, each position once; a sequence that is admitted again is counted anew."""
    board = SamplingBoard(VOCAB, 1, 1, 1)
    del board.graph.tasks[:]
    graph = board.graph
    graph.add(
        CountTokens(
            0,
            "count_tokens",
            slots=board.slots.at(0),
            counts=board.counts.at(0),
            batch=board.batches[0].at(0),
            tables=board.tables.at(0),
        )
    )
    prompt, output = [5, 5, 102, 0], [7, 5, 7, 9]
    with distmk.connect(1) as bootstrap, distmk.Session(graph, bootstrap, backend="host") as session:

        def run(position: int, token: int) -> np.ndarray:
            batch = Batch(num_rows=1, num_runs=1)
            batch.rows[0] = BatchRow(token, position, 3, RowSample.DRAW)
            session.view(board.batches[0])[0] = np.frombuffer(batch, np.uint8)
            session.run()
            return session.view(board.counts).view(np.uint32).reshape(MAX_ROWS, VOCAB)[3].copy()

        session.view(board.counts)[:] = 77
        ids = np.array(prompt + output[:2], np.int32)
        session.view(board.tables)[0, : ids.nbytes] = ids.view(np.uint8)
        slots = (SlotSampling * MAX_ROWS)()
        slots[3] = make_slot(Case("", torch.zeros(VOCAB), in_prompt=frozenset({1})), 0)
        slots[3].prompt_len, slots[3].tokens = len(prompt), session.program.placement.operand(board.tables.at(0))
        for first in (3, 6):  # admitted with the prompt alone, and with two tokens of the output
            session.view(board.slots)[0] = np.frombuffer(slots, np.uint8)
            for position in range(first, 8):
                counts = run(position, (prompt + output)[position])
                want = np.zeros(VOCAB, np.uint32)
                want[prompt] = COUNT_IN_PROMPT
                for token in output[: position + 1 - len(prompt)]:
                    want[token] += 1
                assert (counts == want).all(), position
