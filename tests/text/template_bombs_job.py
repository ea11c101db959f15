"""Render templates that would take minutes or many gigabytes; writes a line of JSON for each, then the peak memory of the
processes. It has no `if __name__ == "__main__"`, as the scripts of users.
"""

import json
import random
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.template_bombs import BOMBS

from distmk.text.chat.template_processes import end_processes, render
from distmk.text.processes.frames import Limits


def measure(bomb: str) -> tuple[str, str, str, float]:
    began = time.monotonic()
    answer = render(bomb, [{"role": "user", "content": "Hi"}], {}, Limits(cpu_s=0.03, memory_bytes=64 << 20))
    return bomb, answer.outcome.name, answer.text[:200], time.monotonic() - began


with ThreadPoolExecutor(2) as threads:
    for found in threads.map(
        measure, [bomb for bombs in BOMBS.values() for bomb in random.sample(bombs, -(-len(bombs) // 3))]
    ):
        print(json.dumps(found))
end_processes()
# The kernel's maximum of this process itself would be that of the process that started it, if that was larger.
lines = Path("/proc/self/status").read_text().splitlines()
own_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print(json.dumps([kib >> 10 for kib in (resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, own_kib)]))
