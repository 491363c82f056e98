"""What a watched command is said to have taken."""

from __future__ import annotations

import sys

from bench.process import watch

MIB = 1 << 20
HELD = 200 * MIB
FORKED = f"""
import os, sys, time
held = bytearray(os.urandom(1)) * {HELD}
for _ in range(3):
    if os.fork() == 0:
        own = bytearray(b"x") * int(sys.argv[1])
        time.sleep(2)
        os._exit(0)
time.sleep(2.2)
"""


def test_pages_of_a_fork_are_counted_once() -> None:
    shared = watch([sys.executable, "-c", FORKED, "0"]).peak_rss_bytes
    assert HELD < shared < HELD + 60 * MIB


def test_what_each_process_has_of_its_own_is_counted() -> None:
    own = watch([sys.executable, "-c", FORKED, str(50 * MIB)]).peak_rss_bytes
    assert HELD + 150 * MIB < own < HELD + 210 * MIB
