"""Mutations of one word that `check` accepts, and what a launch of the mutated program does.

    python tests/support/mutants/hunt.py NUM [SEED [KIND]]      (with tests/ and the repository on PYTHONPATH)

NUM mutations over all kinds of programs, the same number of each word of every struct.
"""

from __future__ import annotations

import collections
import ctypes
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.mutants.fields import verdict_on
from support.mutants.programs import KINDS, Subject, subject
from support.mutants.sandbox import Outcome, differing, each_in_child, run, strays
from support.mutants.sites import Key, Site, sites_of, values

from distmk.backends.host.build import load_runtime
from distmk.check import check
from distmk.errors import CheckError

LONG_S = 20.0


@dataclass(frozen=True)
class Mutant:
    """`value` in place of `old` at a site of a program."""

    subject: Subject
    key: Key
    site: Site
    old: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.subject.name}: {self.site.where} {self.old} -> {self.value}"

    def is_accepted(self) -> bool:
        """Whether `check` accepts it."""
        self.site.put(self.value)
        try:
            check(self.subject.program)
            return True
        except CheckError as error:
            if "cannot be read:" in str(error).partition("\n")[0]:
                raise AssertionError(f"{self}: {error}") from error
            return False
        finally:
            self.site.put(self.old)

    def outcome(self, library: ctypes.CDLL, whole: Outcome) -> str:
        """What a launch does, in a word or two; "" if it is as without the mutation."""
        self.site.put(self.value)
        try:
            program = self.subject.program
            found = run(library, self.subject, program, scheduler_threads=False)
            if found.abort:
                found = run(library, self.subject, program, False, LONG_S)
            if found.abort:
                return f"aborts ({found.abort})"
            if stray := strays(self.subject, program, found):
                return f"writes what it does not declare: {stray[0]}"
            different = differing(program, found, whole)
            if not different:
                return ""
            again = run(library, self.subject, program, scheduler_threads=True)
            if unlike := differing(program, found, again):
                return f"is not the same twice: {', '.join(unlike[:3])}"
            return f"differs: {', '.join(different[:3])}"
        finally:
            self.site.put(self.old)


def mutants_of(made: Subject, num: int, random_: random.Random) -> list[Mutant]:
    """`num` mutations of a program, as many of each word of every struct."""
    sites = sites_of(made.program)
    keys = sorted(sites)
    random_.shuffle(keys)
    found = []
    for index in range(num):
        key = keys[index % len(keys)]
        site = random_.choice(sites[key])
        if drawn := values(site, sites[key], random_):
            found.append(Mutant(made, key, site, site.get(), random_.choice(drawn)))
    return found


def hunt(kind: str, num: int, seed: int | str) -> Iterator[tuple[Mutant, str]]:
    """The accepted ones of `num` mutations of a kind of program, with what is wrong with them ("" : nothing)."""
    library = load_runtime()
    made, random_ = subject(kind), random.Random(f"{seed} {kind}")
    check(made.program)
    accepted = [mutant for mutant in mutants_of(made, num, random_) if mutant.is_accepted()]
    runs = [lambda threads=threads: run(library, made, made.program, threads) for threads in (False, True)]
    outcomes = [result for _, result in each_in_child(runs)]
    whole = outcomes[0]
    assert all(isinstance(each, Outcome) and not each.abort for each in outcomes), f"{kind}: {outcomes}"
    assert not strays(made, made.program, whole), f"{kind}: {strays(made, made.program, whole)}"
    assert not differing(made.program, *outcomes), f"{kind}: {differing(made.program, *outcomes)}"
    jobs = [lambda mutant=mutant: mutant.outcome(library, whole) for mutant in accepted]
    for index, what in each_in_child(jobs):
        mutant = accepted[index]
        yield mutant, verdict_on(mutant.key, mutant.site.is_float, what)


def main() -> None:
    num = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    kinds = [kind for kind in KINDS if len(sys.argv) < 4 or sys.argv[3] == kind]
    print(f"seed {seed}", flush=True)
    total: collections.Counter[str] = collections.Counter()
    for kind in kinds:
        began, num_wrong, num_accepted = time.monotonic(), 0, 0
        for mutant, wrong in hunt(kind, num // len(kinds), seed):
            num_accepted += 1
            if wrong:
                num_wrong += 1
                total[f"{'.'.join(mutant.key)} {wrong.split(':')[0]}"] += 1
                print(f"{mutant}  {wrong}", flush=True)
        took = time.monotonic() - began
        print(
            f"-- {kind}: {num_wrong} wrong of {num_accepted} accepted of {num // len(kinds)}, {took:.1f} s", flush=True
        )
    for what, count in sorted(total.items()):
        print(count, what)


if __name__ == "__main__":
    main()
