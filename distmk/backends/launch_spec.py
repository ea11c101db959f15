"""What a launch is to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchSpec:
    """What one launch is to do. Requests matter on rank 0 only.

    `num_requests`: requests that may be under way, for a launch to which requests are added until it is told to finish; 0: it
    serves `prompts`, and ends. `max_prompt_len`: of a request that is added.
    `num_iterations`: of a program without an iteration barrier; with one, the scheduler step ends the launch.
    `max_pages`: KV cache pages of the longest sequence, if the host wants to know those of every request; else 0. `keeps_cache`:
    pages that the last launch has filled are still good.
    `trace_capacity`: entries that every worker and scheduler keeps, those of its last tasks (0: no trace).
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
    keeps_cache: bool = False
