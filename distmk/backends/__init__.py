"""What runs a program: the host twin, the emulator and GPUs behind one interface; and the upload of weights to them."""
