"""The state directory: which one, made private, refused when it is not ours alone."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from dflash_batch.worker.home import HomeError, home_dir, platform_home


def test_option_comes_before_environment_before_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("DFLASH_BATCH_HOME", raising=False)
    assert home_dir(None) == platform_home()
    assert home_dir(None).is_relative_to(tmp_path / "user")

    monkeypatch.setenv("DFLASH_BATCH_HOME", str(tmp_path / "named"))
    assert home_dir(None) == tmp_path / "named"
    assert home_dir(str(tmp_path / "option")) == tmp_path / "option"


@pytest.mark.skipif(sys.platform == "darwin", reason="XDG folders are not used there")
def test_a_relative_xdg_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "here")
    assert platform_home() == tmp_path / ".local" / "state" / "dflash-batch"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert platform_home() == tmp_path / "state" / "dflash-batch"


def test_it_is_made_for_us_alone_and_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        home = home_dir("a/b")
    finally:
        os.umask(before)
    assert home == tmp_path / "a" / "b"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeError, match="--home or DFLASH_BATCH_HOME"):
        home_dir(str(tmp_path / "file"))


def test_a_folder_that_others_can_write_in_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(HomeError, match="other users can write"):
        home_dir(str(tmp_path))


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(HomeError, match="another user"):
        home_dir(str(tmp_path))
