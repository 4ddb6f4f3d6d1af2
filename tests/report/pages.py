"""Which pages of the experts' weights a row reads: each is taken away in a child process, and the row run there.

python pages.py MODEL ROWS.npy prints for each row the pages of the file without which it died.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

import numpy as np

import colibri
from colibri.format import package

PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)


def dies_without(model: colibri.Model, page: int, row: np.ndarray) -> bool:
    child = os.fork()
    if child == 0:
        address = model.package.data.ctypes.data + page * PAGE
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0) != 0:
            os._exit(2)
        model(row)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "mprotect failed"
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGSEGV
    return os.WIFSIGNALED(status)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    package._COPIED = 0  # the file is mapped, so that its pages are pages of memory
    model, rows = colibri.load(sys.argv[1]), np.load(sys.argv[2])
    model(rows[:1])  # the context is made, the file proven
    pages = [
        page
        for e in model.package.experts
        for page in range(int(e["offset"]) // PAGE, -(-(int(e["offset"]) + int(e["bytes"])) // PAGE))
    ]
    print(json.dumps([[page for page in pages if dies_without(model, page, row[None])] for row in rows]))


if __name__ == "__main__":
    main()
