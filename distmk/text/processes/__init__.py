"""Work on what strangers wrote, in processes of its own, whose time and memory the operating system limits."""
