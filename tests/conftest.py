"""Shared fixtures. This file also makes the modules beside it (helpers.py, reference.py) importable from every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Runner


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


STARTS_NONE = ("unit/", "runtime/test_emulated_races.py", "runtime/test_kernels.py")


def starts_ranks(item: pytest.Item) -> bool:
    """Whether a test starts ranks: in a process of its own, by the fixture `runner`, or in this one."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    by_itself = not path.startswith(STARTS_NONE) or not {"LLM", "Session"}.isdisjoint(vars(item.module))  # type: ignore[attr-defined]
    return by_itself or "runner" in item.fixturenames  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` tests that start ranks take turns: each looks at what all of them leave in shared memory, and
    some have to be in time. The others run beside them.
    """
    for item in items:
        if starts_ranks(item):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture
def rng() -> np.random.Generator:
    """Shapes and data are drawn afresh every run; the seed of a failure is printed with it."""
    import torch

    seed = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The .gguf file of SmolLM2-135M that DISTMK_TEST_GGUF names."""
    path = Path(os.environ.get("DISTMK_TEST_GGUF", ""))
    if not path.is_file():
        pytest.skip("DISTMK_TEST_GGUF does not name the .gguf file of SmolLM2-135M")
    return path


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Any:
    """transformers on the weights of `smollm2`; a `tiny.Reference`."""
    import tiny

    return tiny.Reference.of_gguf(smollm2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of fixed random weights, without a tokenizer."""
    import tiny

    model = tiny.make("llama", seed=1, num_attention_heads=4, num_key_value_heads=2)
    return tiny.save(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """Runs commands; the test fails if anything of them is left."""
    runner = Runner(tmp_path)
    yield runner
    runner.check_nothing_left()
