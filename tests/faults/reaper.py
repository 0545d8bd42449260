"""Runs a command, becomes the parent of whatever that leaves behind, and prints how each of them ended.

    python reaper.py COMMAND …
"""

import ctypes
import os
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    subprocess.Popen(sys.argv[1:])
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return
        print(f"process {pid} ended with {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
