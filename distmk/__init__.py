"""distmk: a multi-GPU distributed megakernel runtime for tensor-parallel LLM decode.

`LLM`, `AsyncLLM` and `SamplingParams` serve a model. `CausalLM`, `ModelConfig`, `nn` and `register_model` define one.
`choose_target`, `Graph`, `tasks` and `Session` build and run a task graph. `register` adds types of tasks, and
`testing` compares them with their oracles.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing's own takes milliseconds, in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from typing import Any

    from distmk import tasks, testing
    from distmk.abi import Scores
    from distmk.api.async_llm import AsyncLLM
    from distmk.api.llm import LLM
    from distmk.api.outputs import RequestOutput
    from distmk.backends.target import Target, choose_target
    from distmk.bootstrap import connect
    from distmk.cli.exit_status import run_main
    from distmk.engine.engine_args import EngineArgs
    from distmk.engine.sampling_params import RequestOutputKind, SamplingParams
    from distmk.engine.session import Session
    from distmk.engine.structured_outputs import StructuredOutputsParams
    from distmk.engine.token_output import TokenOutput
    from distmk.errors import CheckError, DistmkError, HangError, ModelError, RankLostError, UsageError
    from distmk.graph.graph import Graph
    from distmk.model import nn
    from distmk.model.causal_lm import CausalLM, register_model
    from distmk.model.config import ModelConfig
    from distmk.program.program import compile_graph
    from distmk.tasks.own_types import register
    from distmk.text.chat.messages import ChatPrompt

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "api.async_llm",
    "CausalLM": "model.causal_lm",
    "ChatPrompt": "text.chat.messages",
    "CheckError": "errors",
    "DistmkError": "errors",
    "EngineArgs": "engine.engine_args",
    "Graph": "graph.graph",
    "HangError": "errors",
    "LLM": "api.llm",
    "ModelConfig": "model.config",
    "Scores": "abi",
    "ModelError": "errors",
    "RankLostError": "errors",
    "RequestOutput": "api.outputs",
    "RequestOutputKind": "engine.sampling_params",
    "SamplingParams": "engine.sampling_params",
    "Session": "engine.session",
    "StructuredOutputsParams": "engine.structured_outputs",
    "Target": "backends.target",
    "TokenOutput": "engine.token_output",
    "UsageError": "errors",
    "choose_target": "backends.target",
    "compile_graph": "program.program",
    "connect": "bootstrap",
    "nn": "model.nn",
    "register": "tasks.own_types",
    "register_model": "model.causal_lm",
    "run_main": "cli.exit_status",
    "tasks": "tasks",
    "testing": "testing",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CausalLM",
    "ChatPrompt",
    "CheckError",
    "DistmkError",
    "EngineArgs",
    "Graph",
    "HangError",
    "ModelConfig",
    "ModelError",
    "RankLostError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Scores",
    "Session",
    "StructuredOutputsParams",
    "Target",
    "TokenOutput",
    "UsageError",
    "choose_target",
    "compile_graph",
    "connect",
    "nn",
    "register",
    "register_model",
    "run_main",
    "tasks",
    "testing",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import distmk` costs nothing and needs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distmk' has no attribute {name!r}")
    import importlib

    home = _HOMES[name]
    module = importlib.import_module(f"distmk.{home}")
    return module if home.rpartition(".")[2] == name else getattr(module, name)
