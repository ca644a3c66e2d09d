"""What kind of file system a path lies on."""

from __future__ import annotations

from pathlib import Path

from archsearch.mounts import network_file_system


def test_network_file_systems_are_recognised() -> None:
    mounts = (
        "root / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0\nlocal /home/me/my\\040disk xfs rw 0 0\n"
    )
    assert network_file_system(Path("/var/run"), mounts) is None
    assert network_file_system(Path("/home/me/run"), mounts) == "nfs4"
    assert network_file_system(Path("/home/me/my disk/run"), mounts) is None


def test_a_link_lies_where_it_leads(tmp_path: Path) -> None:
    mounts = f"root / ext4 rw 0 0\nserver:/x {tmp_path.resolve() / 'shared'} nfs4 rw 0 0\n"
    (tmp_path / "shared").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "shared")
    assert network_file_system(tmp_path / "runs/new", mounts) == "nfs4"
    assert network_file_system(tmp_path / "other", mounts) is None
