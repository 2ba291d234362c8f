"""What the machine refuses (disk, memory, open files, a port), in a sentence and with a way on."""

from __future__ import annotations

import errno
import os
import re
import resource

from freescale.errors import FreeScaleError

_NO_FOLDER = "No usable temporary directory"
"""What Python says where it could not write into any folder for temporary files, whatever kept it from that."""

_CLOSED_SINCE = 8
"""Files that may have been closed between an error and its telling."""

_NO_MEMORY = "can't allocate memory"
"""What torch says in an error that is like any other."""

_FREE_DISK = "free disk space or choose another folder; a run resumes from its last checkpoint"
_LET_WRITE = "choose another path, or let this user read and write there"
_OTHER_PATH = "choose another path: one is a file where a folder is wanted, or the other way round"
_WAYS = {
    errno.ENOSPC: _FREE_DISK,
    errno.EDQUOT: _FREE_DISK,
    errno.EACCES: _LET_WRITE,
    errno.EPERM: _LET_WRITE,
    errno.EROFS: _LET_WRITE,
    errno.EEXIST: _OTHER_PATH,
    errno.ENOTDIR: _OTHER_PATH,
    errno.EISDIR: _OTHER_PATH,
    errno.ENOENT: "see that the path is there, and still there while it is used",
}
_ADDRESSES = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def as_problem(error: Exception) -> Exception:
    """The same as a problem the user can mend, where it is one of the machine's refusals."""
    if _too_many_files(error):
        return FreeScaleError(
            "this process may not open more files",
            got=f"{os.strerror(errno.EMFILE)} ({str(error).splitlines()[0]})",
            next_step="raise the limit (`ulimit -n`)",
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY in str(error)):
        return FreeScaleError(
            "the memory of this machine was not enough",
            got=_asked(str(error)),
            next_step="ask for less: in a recipe data.global_batch, data.max_length, model.dim or embedding.rows; "
            "or start fewer ranks on a machine",
        )
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError):
        return error
    if error.errno in _ADDRESSES:
        return FreeScaleError(
            f"this address cannot be listened on: {error.strerror}",
            next_step="choose another port (--port), or end what listens there",
        )
    if _NO_FOLDER in str(error):
        return FreeScaleError(
            f"there is no folder for temporary files: {error.strerror or error}",
            next_step="set TMPDIR to a folder that this user may write to, on a disk that is not full",
        )
    where = f"{error.filename}: " if error.filename else ""
    return FreeScaleError(
        f"the system refused a file operation: {where}{error.strerror or error}",
        next_step=_WAYS.get(error.errno or 0, "set FREESCALE_DEBUG=1 to see where it happened"),
    )


def _asked(text: str) -> str | None:
    """How much was asked for, where it is said; else the words."""
    if found := re.search(r"allocate (\d+) bytes", text):
        return f"{int(found[1]) / 2**30:,.1f} GiB more"
    return next(iter(text.splitlines()), None)


def _too_many_files(error: Exception) -> bool:
    """Whether this process had no descriptor left; libraries say so in words of their own, or of something else."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return True
    if isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error):
        return True
    return isinstance(error, OSError) and _NO_FOLDER in str(error) and _few_left()


def _few_left() -> bool:
    """Whether almost as many files are open as may be."""
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError as refused:
        return refused.errno == errno.EMFILE
    return num_open + _CLOSED_SINCE >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
