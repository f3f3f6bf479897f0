"""Programs that start where nothing but torch is imported, in a fraction of a second.

Importing torch takes seconds. One process does it for all programs, and each runs in a fork of it.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import textwrap

SERVER = """
import json, os, sys, tempfile
import torch

for line in sys.stdin:
    program, arguments, environment = json.loads(line)
    files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    print(json.dumps([code, *(file.read().decode() for file in files)]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes)
    atexit.register(server.communicate)  # no more programs: it ends
    return server


def run_beside_torch(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c program *arguments`` would, and return how it ended."""
    program = textwrap.dedent(program)
    command = [sys.executable, "-c", program, *arguments]
    if not hasattr(os, "fork"):
        return subprocess.run(command, capture_output=True, text=True)
    server = _server()
    print(json.dumps([program, arguments, dict(os.environ)]), file=server.stdin, flush=True)
    return subprocess.CompletedProcess(command, *json.loads(server.stdout.readline()))
