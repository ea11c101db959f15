"""Backends, which run programs: the host twin, the emulator and GPUs behind one interface. Also uploads weights to them."""
