"""Programs in forks of one process that has imported torch alone: processes of their own, without the seconds of that import.

Not for what must be known before torch is loaded: variables that its libraries read then, checks of the heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

SECONDS = 300  # a program is ended after them


class Forks:
    """The process that forks; ended with its standard input."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], **pipes)

    def run(self, program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """As `python -c`, with variables besides those of this process; PYTHONPATH is searched first."""
        with tempfile.TemporaryDirectory() as folder:
            asked = {"program": program, "arguments": [*map(str, arguments)], "folder": folder, "cwd": os.getcwd()}
            asked["environment"] = {**os.environ, **environment}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            status = self.process.stdout.readline()
            assert status, f"the process that forks has ended: {self.process.poll()}"
            said = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(program, int(status), *said)

    def close(self) -> None:
        """Waits until it has ended."""
        self.process.communicate()


def _compute(program: str, arguments: list[str], folder: str, cwd: str, environment: dict[str, str]) -> int:
    """In the fork: the exit status."""
    signal.alarm(SECONDS)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.path[0:1] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Runs what is asked for, line by line, and answers with exit statuses."""
    import torch  # noqa: F401  what the forks have

    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = _compute(**json.loads(line))
            with contextlib.suppress(OSError):
                sys.stdout.flush(), sys.stderr.flush()
                ctypes.CDLL(None).fflush(None)
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
