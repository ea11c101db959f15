"""The engine: one rank loads a model (compile, prove, allocate, upload), then runs launches together with the other ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distmk import env
from distmk.backends.cuda.gpus import check_residence
from distmk.backends.defaults import (
    RowBuckets,
    agree_on_backend,
    agree_on_workers,
    backend_choices,
    check_heads,
    check_schedulers,
    choose_max_seqs,
    choose_model_len,
    choose_row_buckets,
)
from distmk.backends.host.room import WEIGHTS, check_room
from distmk.backends.host.shm import find_hosts
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.weight_upload import fill_weights
from distmk.bootstrap import Bootstrap, agree, agree_same
from distmk.bootstrap.messages import gather_json
from distmk.console import tell
from distmk.engine.context_notice import tell_of_context
from distmk.engine.engine_args import EngineArgs
from distmk.engine.kept_logits import collect_logits
from distmk.engine.kv_memory import KvMemory, with_kv_pages
from distmk.engine.own_model import OwnModel
from distmk.engine.program_cache import proved_program
from distmk.engine.running_launch import RunningLaunch
from distmk.engine.session import Session
from distmk.interrupts import deferred
from distmk.lower import DecodeOptions
from distmk.lower.memory import least_memory
from distmk.lower.packed import CUT_BLOCKS, shards_fit_jobs
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.nvtx_ranges import nvtx_range
from distmk.progress import Progress, progress
from distmk.text.tokenizer_files import end_tokens, find_tokenizer
from distmk.trace import Trace
from distmk.weights import Checkpoint, open_checkpoint
from distmk.weights.choose_formats import choose_formats, describe_formats

_NOT_SHARED = ("model", "tokenizer")  # arguments that may differ between hosts: paths


def _peak_bytes() -> int:
    """Peak resident memory of this process. (getrusage would report the parent's if that was larger.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _open(args: EngineArgs, own: OwnModel | None) -> Checkpoint:
    if own is not None:
        return own.open(args.load_format, args.seed or 0)
    return open_checkpoint(args.model, args.load_format, args.seed or 0, args.revision)


class Engine:
    """A model ready to run on this rank. All calls are collective, and raise their errors on every rank alike.

    own: the caller's own model, instead of `args.model`.

    UsageError, ModelError, BuildError: the arguments cannot be served. CheckError: the compiler made a mistake.
    """

    def __init__(self, args: EngineArgs, bootstrap: Bootstrap, own: OwnModel | None = None) -> None:
        self.args, self.bootstrap = args, bootstrap
        self.trace: Trace | None = None  # of the last launch, on rank 0
        self.logits: npt.NDArray[np.float32] = np.zeros(0, np.float32)  # of the last launch that was asked for them
        self.backend_name = agree_on_backend(bootstrap, args.backend)
        self.checkpoint = agree(bootstrap, lambda: _open(args, own))
        self.config = agree(bootstrap, self._config)
        self.tokenizer_files = agree(bootstrap, lambda: find_tokenizer(args, self.checkpoint))
        self.eos_ids = agree(bootstrap, lambda: end_tokens(self.checkpoint, self.tokenizer_files))
        if bootstrap.rank == 0:
            self._tell_of_weights()
        agree(bootstrap, lambda: check_heads(self.config.head_dim, self.backend_name))
        settings = {name: str(value) for name, value in asdict(args).items() if name not in _NOT_SHARED}
        agree_same(bootstrap, "models or options", {"model": self.checkpoint.fingerprint, **settings})
        if self.backend_name == "cuda" and args.idle_exit_s is None:
            check_residence(bootstrap)
        longest = agree(bootstrap, lambda: choose_model_len(args.max_model_len, self.config))
        self.num_workers = self._agree_on_workers()
        self.host_sizes = find_hosts(bootstrap)
        self.load_s: dict[str, float] = {}  # seconds by stage: program, runtime, weights
        with self._stage("program", "compiling the program"):
            options = agree(bootstrap, lambda: self._options(longest))
            agree(bootstrap, lambda: self._check_room(options))
            asked = KvMemory(args.gpu_memory_utilization, args.num_gpu_blocks_override, args.max_model_len is None)
            self._decode_options = options = with_kv_pages(self.config, options, asked, self.backend_name, bootstrap)
            program = agree(bootstrap, lambda: proved_program(self.config, options, bootstrap.rank))
        if bootstrap.rank == 0:
            tell_of_context(args.max_model_len, self.max_model_len, self.config)
        with self._stage("runtime", "starting the runtime"):
            self.session = Session(
                program,
                bootstrap,
                deadline_s=args.deadline_s,
                backend=self.backend_name,
                proved=True,
                scheduler_threads=args.num_schedulers is not None,
            )
        try:
            with self._stage("weights", "loading the weights") as loaded:
                agree(bootstrap, lambda: self._upload(loaded))
        except BaseException:
            self.session.close()
            raise

    def _config(self) -> ModelConfig:
        """The checkpoint's config, with the weight formats that matrices have in memory."""
        tiled = backend_choices(self.backend_name)["tiled"]
        formats = choose_formats(self.checkpoint, self.args.quantization, tiled)
        return dataclasses.replace(self.checkpoint.config, formats=formats)

    def _tell_of_weights(self) -> None:
        for note in self.checkpoint.notes:
            tell(f"warning: {note}")
        if line := describe_formats(self.config):
            tell(line)

    @contextmanager
    def _stage(self, stage: str, doing: str) -> Iterator[Progress]:
        """A stage of loading: timed, on the profiler's timeline, and rank 0 shows how far it is."""
        began = time.perf_counter()
        with progress(doing, shown=self.bootstrap.rank == 0) as block, nvtx_range(doing):
            yield block
        self.load_s[stage] = time.perf_counter() - began

    def _agree_on_workers(self) -> int:
        """The number of workers of every rank: the least that any of them would choose for itself."""
        args = self.args
        own_sm = args.num_schedulers is not None
        num_workers = agree_on_workers(self.bootstrap, args.num_workers, self.backend_name, own_sm)
        check_schedulers(args.num_schedulers, num_workers, self.backend_name)
        return num_workers

    def _options(self, max_model_len: int) -> DecodeOptions:
        buckets, choices, drafter = self._row_buckets(), backend_choices(self.backend_name), self.args.drafter
        if drafter is not None and drafter.row_cost is not None:
            choices["draft_row_cost"] = drafter.row_cost
        return DecodeOptions(
            num_ranks=self.bootstrap.world_size,
            num_workers=self.num_workers,
            num_schedulers=self.args.num_schedulers,
            max_seqs=choose_max_seqs(self.args.max_num_seqs, buckets, self.backend_name),
            max_model_len=max_model_len,
            deterministic=self.args.deterministic,
            keep_logits=self.args.keep_logits,
            loopback=env.loopback(),
            row_buckets=buckets.rows,
            host_sizes=self.host_sizes if len(self.host_sizes) > 1 else (),
            drafter=drafter,
            **choices,
        )

    def _row_buckets(self) -> RowBuckets:
        return choose_row_buckets(
            self.args.max_num_batched_tokens,
            self.backend_name,
            self.bootstrap,
            is_traced=self.args.trace_iterations > 0,
            schedulers_apart=self.args.num_schedulers is not None,
            deterministic=self.args.deterministic,
            num_hosts=len(self.host_sizes),
            cut_blocks="" if shards_fit_jobs(build_model(self.config), self.bootstrap.world_size) else CUT_BLOCKS,
        )

    def _check_room(self, options: DecodeOptions) -> None:
        """UsageError: this host has too little memory, even for one sequence, or for one page if the context is a default."""
        if self.backend_name != "cuda":
            if self.args.max_model_len is None:
                options = dataclasses.replace(options, max_model_len=min(options.max_model_len, options.page_size))
            need = least_memory(self.config, dataclasses.replace(options, num_pages=options.max_pages))
            private = {WEIGHTS: need.weights, "KV cache": need.kv_cache, "activations": need.jobs}
            check_room(private, need.heap, self.bootstrap.local_size)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self._decode_options.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self._decode_options.max_seqs

    @property
    def num_kv_pages(self) -> int:
        """Pages of the KV cache, on each rank."""
        return self._decode_options.total_pages

    @property
    def page_size(self) -> int:
        """Tokens of a page of the KV cache."""
        return self._decode_options.page_size

    @property
    def caches_prefixes(self) -> bool:
        """Whether prompts reuse cached pages. With logits kept, all of a prompt is computed."""
        return self.args.enable_prefix_caching and not self.args.keep_logits

    def _upload(self, loaded: Progress) -> None:
        fill_weights(self.session.program, self.session.backend, self.bootstrap.rank, self.checkpoint, loaded)
        self.checkpoint.close()

    def launch(self) -> RunningLaunch:
        """Start a launch; rank 0 adds requests to it until it lets it finish (`RequestTable`)."""
        num_traced = self.args.trace_iterations
        return self.session.launch(
            LaunchSpec(
                # As many wait in the launch as run, so that no slot waits for the host.
                num_requests=2 * self.max_num_seqs,
                max_prompt_len=self.max_model_len,
                eos_ids=self.eos_ids,
                deadline_s=self.args.deadline_s or env.deadline_s(),
                trace_capacity=self.session.room_for(num_traced) if num_traced else 0,
                max_pages=self._decode_options.max_pages if self.caches_prefixes else 0,
                vocab_size=self.config.vocab_size,
                keeps_cache=self.caches_prefixes,
            )
        )

    def take_part(self, gather_logits: bool) -> None:
        """The part of another rank in a launch of rank 0's."""
        with deferred():
            launch = self.launch()
        for _ in launch.tokens(lambda: self.gather(launch, gather_logits)):
            pass

    def gather(self, launch: RunningLaunch, gather_logits: bool) -> None:
        """Collect from all ranks what a launch that has ended in order leaves: `trace`, and `logits` if asked for."""
        num_traced = self.args.trace_iterations
        self.trace = launch.trace(num_traced) if num_traced and not launch.left else None
        if gather_logits and not launch.left:
            self.logits = collect_logits(self.session, self._decode_options, self.config, self.bootstrap)

    def close(self) -> None:
        self.session.close()

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of every rank's process so far, by rank."""
        return gather_json(self.bootstrap, _peak_bytes(), "peak memory", int)
