"""What kind of file system a path lies on. No torch."""

from __future__ import annotations

from pathlib import Path

_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p")


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that path lies on, None on a local one (or no Linux).

    mounts is the text of /proc/mounts, read where not given.
    """
    if mounts is None:
        table = Path("/proc/mounts")
        mounts = table.read_text(errors="replace") if table.exists() else ""
    # A folder of runs is often a link to a disk that machines share.
    path, best, kind = path.resolve(), "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind if any(name in kind for name in _NETWORK_FILE_SYSTEMS) else None
