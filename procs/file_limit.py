"""Room for many connections: each is a descriptor, and the soft limit is often 1024."""

from __future__ import annotations

import resource


def allow_files(wanted: int) -> None:
    """Raise this process's limit of open files to ``wanted``, or as far as it may go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
