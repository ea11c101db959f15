"""Shared fixtures. Its folder is on sys.path, so that tests can import support."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiers
from support.faults import write_config
from support.helpers import Runner
from support.tiny_config import tiny_config


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="run the tests of `bash scripts/test.sh fast` (support/tiers.py)"
    )
    parser.addoption("--drawn", action="store_true", help="of functions marked `drawn(n)`, run n cases")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for option, choose in (("--fast", tiers.choose), ("--drawn", tiers.choose_drawn)):
        if config.getoption(option):
            chosen = choose(items, tiers.seed_of(config))
            config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
            items[:] = chosen


def pytest_configure() -> None:
    """Take Ctrl-C: a shell's background jobs ignore it, and so would the processes that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed every run, which is printed, and the seed of torch."""
    import torch

    seed = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def slab_iterations() -> Iterator[None]:
    """Iterations of at most 16 tokens: a sequence's tokens are then the same bits whatever it shares its iterations with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTMK_ROW_BUCKETS", "16")
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The .gguf file of SmolLM2-135M that DISTMK_TEST_GGUF names."""
    path = Path(os.environ.get("DISTMK_TEST_GGUF", ""))
    if not path.is_file():
        pytest.skip("DISTMK_TEST_GGUF does not name the .gguf file of SmolLM2-135M")
    return path


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Any:
    """The `tiny.Reference` of `smollm2`."""
    from support import tiny

    return tiny.Reference.of_gguf(smollm2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of fixed random weights, without a tokenizer."""
    from support import tiny

    model = tiny.make("llama", seed=1, num_attention_heads=4, num_key_value_heads=2)
    return tiny.save(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_model: Path) -> Any:
    """The `tiny.Reference` of `tiny_model`."""
    from support import tiny

    return tiny.Reference.of(tiny_model, "cpu")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny model whose context lets it generate for minutes."""
    return write_config(tiny_config(), tmp_path_factory.mktemp("endless") / "config.json")


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """Runs commands; the test fails if a process or shared memory of theirs is left."""
    runner = Runner(tmp_path)
    yield runner
    runner.check_nothing_left()
