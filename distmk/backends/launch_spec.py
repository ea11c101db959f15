"""The specification of a launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchSpec:
    """The specification of one launch. Requests matter on rank 0 only.

    num_requests: for a launch to which requests are added until it is told to finish, how many may be under way. 0: the
      launch serves `prompts` and ends.
    max_prompt_len: of a request that is added.
    num_iterations: for a program without an iteration barrier. With a barrier, the scheduler step ends the launch.
    max_pages: KV cache pages of the longest sequence, if the host wants to know the pages of every request; else 0.
    vocab_size: tokens of the vocabulary, if requests may be constrained; else 0.
    keeps_cache: pages that the last launch has filled are still valid.
    trace_capacity: how many entries every worker and scheduler keeps, for its last tasks (0: no trace).
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    max_new: tuple[int, ...] = ()
    ignore_eos: bool = False
    eos_ids: tuple[int, ...] = ()
    num_requests: int = 0
    max_prompt_len: int = 0
    num_iterations: int = 0
    deadline_s: float = 30.0
    trace_capacity: int = 0
    max_pages: int = 0
    vocab_size: int = 0
    keeps_cache: bool = False
