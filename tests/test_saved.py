"""States in a folder: whole or not there, and nothing beside them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zephon.command import saved


def test_a_file_is_whole_and_alone(tmp_path: Path) -> None:
    for raw in (b"one", b"one", b"another", b""):
        saved._keep(tmp_path / "lane_00000", raw)
        assert [path.name for path in tmp_path.iterdir()] == ["lane_00000"]
        assert (tmp_path / "lane_00000").read_bytes() == raw


def test_where_files_need_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_TMPFILE | os.O_CREAT)  # refused, as by NFS
    for raw in (b"one", b"another"):
        saved._keep(tmp_path / "lane_00000", raw)
        assert [path.name for path in tmp_path.iterdir()] == ["lane_00000"]
        assert (tmp_path / "lane_00000").read_bytes() == raw


def test_a_kill_while_writing_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom zephon.command import saved\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "saved._keep(Path(sys.argv[1], 'lane_00000'), b'x' * 100)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
