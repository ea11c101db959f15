"""Models of one's own: weights in memory and in files, at several ranks, from a script, and the mistakes one can make."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.evaluate import evaluate
from support.full_disk import disk_for
from support.helpers import ROOT, Runner
from support.own_lm import CONFIG, OwnLM, PackedLM
from support.tiny import relative_error
from torch import Tensor

from distmk import LLM, ModelConfig, ModelError, SamplingParams, UsageError
from distmk.formats import find_format
from distmk.model.bf16 import torch_to_bf16

IDS = list(range(1, 50, 3))
TOLERANCE = 0.02  # of bf16 weights and activations, relative


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    torch.manual_seed(11)
    scaled = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in OwnLM(CONFIG).weights().items()}
    return {name: value.bfloat16() if value.ndim == 2 else 1 + value for name, value in scaled.items()}


@pytest.fixture(scope="module")
def wanted(weights: dict[str, Tensor]) -> Tensor:
    """Logits of the last token."""
    exact = {name: value.double() for name, value in weights.items()}
    return evaluate(OwnLM(CONFIG).logits(), exact, torch.tensor(IDS))[-1]


def check_logits(wanted: Tensor, given: Any, num_ranks: int) -> None:
    with LLM(
        OwnLM(CONFIG), weights=given, tensor_parallel_size=num_ranks, num_workers=1, keep_logits=True, max_model_len=64
    ) as llm:
        assert llm.tokenizer is None and llm.model == "OwnLM"
        found = torch.from_numpy(llm.compute_logits(IDS).copy()).double()
    error = relative_error(found, wanted)
    assert error < TOLERANCE, f"off by {error:.2g}, most at token {int((found - wanted).abs().argmax())}"


@pytest.mark.parametrize(("kind", "num_ranks"), [("torch", 1), ("numpy", 3), ("torch", 2), ("folder", 2), ("file", 1)])
def test_logits(kind: str, num_ranks: int, weights: dict[str, Tensor], wanted: Tensor, tmp_path: Path) -> None:
    given: Any = weights
    if kind == "numpy":
        given = {name: value.float().numpy() for name, value in weights.items()}
    elif kind != "torch":
        given = tmp_path if kind == "folder" else str(tmp_path / "model.safetensors")
        save_file(weights, tmp_path / "model.safetensors")
    check_logits(wanted, given, num_ranks)


def packed_values(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of weights whose matrices `PackedLM` has in FP8."""
    found = find_format("fp8")
    names = [name for name in weights if name.split(".")[-2] in ("embed", "o", "gate_up")]
    packed = {name: torch.from_numpy(found.values(found.quantize(torch_to_bf16(weights[name])))) for name in names}
    return weights | packed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_formats_of_matrices(num_ranks: int, weights: dict[str, Tensor]) -> None:
    exact = {name: value.double() for name, value in packed_values(weights).items()}
    want = evaluate(PackedLM(CONFIG).logits(), exact, torch.tensor(IDS))[-1]
    options: dict[str, Any] = {"tensor_parallel_size": num_ranks, "num_workers": 1, "max_model_len": 64}
    with LLM(PackedLM(CONFIG), weights=weights, keep_logits=True, **options) as llm:
        found = torch.from_numpy(llm.compute_logits(IDS).copy()).double()
    assert relative_error(found, want) < TOLERANCE


def test_unknown_formats_are_refused() -> None:
    class Odd(OwnLM):
        matrix_format = "int3"

    with pytest.raises(UsageError, match=r"the weight format of .* is 'int3'; formats are bf16, fp8"):
        LLM(Odd(CONFIG), load_format="dummy", max_model_len=16)


SCRIPT = """
from distmk import LLM, ModelConfig, SamplingParams
from support.own_lm import CONFIG, OwnLM as Base

class OwnLM(Base):
    pass

def work():
    with LLM(OwnLM(CONFIG), load_format="dummy", tensor_parallel_size=2, num_workers=1, max_model_len=64) as llm:
        print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids)

{guard}work()
"""


def run_script(runner: Runner, tmp_path: Path, guard: str) -> Any:
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard))
    return runner.run([sys.executable, str(tmp_path / "script.py")], {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})


def test_a_class_of_a_script(runner: Runner, tmp_path: Path) -> None:
    done = run_script(runner, tmp_path, 'if __name__ == "__main__": ')
    with LLM(OwnLM(CONFIG), load_format="dummy", num_workers=1, max_model_len=64) as llm:
        alone = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
    assert done.status == 0, done.stderr
    found = [int(token) for token in done.stdout.strip("[]\n").split(",")]
    assert len(found) == 4 and len(alone) == 4
    unguarded = run_script(runner, tmp_path, "")
    assert unguarded.status != 0 and 'put that behind if __name__ == "__main__":' in unguarded.stderr


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherConfig(ModelConfig):
    pass


def test_mistakes(weights: dict[str, Tensor], tmp_path: Path) -> None:
    model = OwnLM(CONFIG)

    def refused(error: type[Exception], text: str, given: Any = model, **options: Any) -> None:
        with pytest.raises(error, match=text) as raised:
            LLM(given, **options)
        assert "\n" not in str(raised.value)

    class Local(OwnLM):
        pass

    refused(UsageError, "is defined inside a function", Local(CONFIG), load_format="dummy", tensor_parallel_size=2)
    refused(UsageError, r"model is the class OwnLM; give an object, OwnLM\(config\)", OwnLM)
    refused(UsageError, "weights go with a model of your own", "path", weights=weights)
    refused(UsageError, "weights is 5; expected tensors by name", weights=5)
    refused(UsageError, "needs weights: tensors by name, a folder of safetensors, or load_format='dummy'")
    refused(ModelError, f"{tmp_path}/none: no such folder or file", weights=tmp_path / "none")
    refused(
        UsageError,
        "norm.weight is list; a torch tensor or numpy array of floats",
        weights=weights | {"norm.weight": [1]},
    )
    refused(UsageError, "and load_format='dummy', which makes random ones", weights=weights, load_format="dummy")
    other = OwnLM(OtherConfig(**vars(CONFIG)))
    refused(UsageError, "OwnLM.Config is ModelConfig, but .* set Config = OtherConfig", other, tensor_parallel_size=2)
    for wrong, text in {
        torch.ones(24, dtype=torch.int32): "norm.weight is Tensor of torch.int32; a torch",
        torch.ones(24, device="meta"): r"norm.weight is .* without data \(on the device meta\)",
        torch.eye(24).to_sparse(): "norm.weight is Tensor of torch.float32 and torch.sparse_coo; a torch",
    }.items():
        refused(UsageError, text, weights=weights | {"norm.weight": wrong})
    refused(UsageError, "the name 3 is no text", weights={3: torch.ones(1)}, tensor_parallel_size=2)
    missing = weights | {"norm.weight": torch.ones(5)}
    refused(ModelError, r"^weights: tensor norm.weight has shape \[5\]", weights=missing, tensor_parallel_size=2)
    with pytest.raises(UsageError, match="the config of OwnLM is None; expected a ModelConfig"):
        OwnLM(None)
    without = {name: value for name, value in weights.items() if name != "head.weight"}
    refused(ModelError, "weights: tensor head.weight is missing", weights=without)
    refused(ModelError, r"tensor norm.weight has shape \[5\]", weights=weights | {"norm.weight": torch.ones(5)})
    broken = weights | {"0.o.weight": torch.full_like(weights["0.o.weight"], np.nan)}
    refused(ModelError, "0.o.weight has weights that are NaN or infinite", weights=broken)


@pytest.mark.parametrize("are_arrays", [False, True], ids=["tensors", "arrays"])
def test_no_room_for_weights(are_arrays: bool, weights: dict[str, Tensor]) -> None:
    given = {name: value.float().numpy() for name, value in weights.items()} if are_arrays else weights
    with disk_for(1000), pytest.raises(UsageError, match="cannot write the weights for the ranks") as raised:
        LLM(OwnLM(CONFIG), weights=given, tensor_parallel_size=2)
    assert "\n" not in str(raised.value)
