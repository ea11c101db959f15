"""Damages the host runtime in the cache in every way and loads it each time; a hang or a crash ends this process.

Arguments: the folder of the cache, a seed. DISTMK_CXX is a compiler that only copies.
"""

import faulthandler
import os
import random
import shutil
import signal
import sys
from pathlib import Path

from support.damage import ways

from distmk.backends.host.build import build, load_runtime
from distmk.errors import BuildError

signal.signal(signal.SIGALRM, signal.SIG_DFL)
faulthandler.enable()
path = build()
assert path.parent == Path(sys.argv[1])
for name, damage in ways(random.Random(int(sys.argv[2]))):
    os.replace(shutil.copy2(path, path.with_name("copy")), path)  # the file itself is mapped by this process
    damage(path)
    print(name, flush=True)
    signal.alarm(10)
    try:
        load_runtime()
    except BuildError as error:
        print(f"not rebuilt: {error}")
    signal.alarm(0)
left = [entry.name for entry in os.scandir(path.parent)]
assert len(left) == 3, f"besides library, digest and lock: {left}"
