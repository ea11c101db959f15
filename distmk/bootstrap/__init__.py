"""How the ranks of a job find each other and exchange bytes. Does not depend on models."""

from distmk.bootstrap.agreement import agree, agree_same
from distmk.bootstrap.base import Bootstrap, LauncherKind
from distmk.bootstrap.detect import connect, detect
from distmk.bootstrap.local import setup_follower

__all__ = ["Bootstrap", "LauncherKind", "agree", "agree_same", "connect", "detect", "setup_follower"]
