"""A disk that fails: every change of a real directory is counted, and one of them can be the last or be refused."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Fault = Literal["", "killed", "power", "full once", "full"]


class PowerOffError(BaseException):
    """The process has ended here. It is no Exception, so that no code handles it."""


class FaultyDisk:
    """Counts calls of os.mkdir, fsync, replace, unlink and rmdir below one directory, and lets one of them fail.

    "killed": the process ends before that operation. "power": the whole machine ends. Then files that were not flushed are
    torn, and of the changes of a directory that was not flushed since, any may be lost. "full once": this operation raises
    ENOSPC, or the next one that needs space; "full": so do all later ones, until `mend`.

    Args:
        folder: the directory.
        monkeypatch: of pytest.
        fault: what happens.
        at: the number of the operation.
        seed: which changes are lost.
    """

    def __init__(self, folder: Path, monkeypatch: Any, fault: Fault = "", at: int = -1, seed: int = 0) -> None:
        self.folder, self.fault, self._at = folder, fault, at
        self._draw = random.Random(seed)
        self.operations = 0
        self._flushed: set[str] = set()  # files whose bytes are on the disk
        self._unsafe: list[tuple[str, Callable[[], None]]] = []  # (directory, how to undo a change of it)
        for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def mend(self) -> None:
        """From now on everything works: the process is started again, or the disk has space."""
        self.fault = ""

    def _counted(self, name: str, operate: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *others: Any, dir_fd: int | None = None, **options: Any) -> Any:
            where = (
                Path(os.readlink(f"/proc/self/fd/{path if name == 'fsync' else dir_fd}"))
                if (name == "fsync" or dir_fd is not None)
                else Path()
            )
            whole = where if name == "fsync" else where / path
            if self.folder not in (whole, *whole.parents):
                return operate(path, *others, **options) if dir_fd is None else operate(path, *others, dir_fd=dir_fd)
            self._fail(name)
            undo = self._undo(name, whole, *others)
            result = None
            if name != "fsync":  # nothing here depends on the real disk
                result = operate(path, *others, **options) if dir_fd is None else operate(path, *others, dir_fd=dir_fd)
            self._note(name, whole, undo, *others)
            return result

        return counted

    def _fail(self, name: str) -> None:
        now, self.operations = self.operations, self.operations + 1
        if not self.fault or now < self._at:
            return
        if self.fault in ("killed", "power"):
            raise PowerOffError
        if name in ("mkdir", "fsync", "replace"):
            if self.fault == "full once":
                self.mend()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _undo(self, name: str, path: Path, *others: Any) -> Callable[[], None] | None:
        if name == "fsync":
            return None
        changed = Path(others[0]) if name == "replace" else path
        before = changed.read_bytes() if changed.is_file() else None
        flushed = str(changed) in self._flushed

        def undo() -> None:
            if before is not None:
                changed.parent.mkdir(parents=True, exist_ok=True)
                changed.write_bytes(before)
                self._flushed.update({str(changed)} if flushed else ())
            elif changed.is_dir() and name == "mkdir":
                for each in sorted(changed.rglob("*"), reverse=True):
                    each.unlink() if each.is_file() else each.rmdir()
                changed.rmdir()
            elif name == "replace":
                changed.unlink(missing_ok=True)

        return undo

    def _note(self, name: str, path: Path, undo: Callable[[], None] | None, *others: Any) -> None:
        if name == "fsync" and path.is_dir():
            self._unsafe = [each for each in self._unsafe if each[0] != str(path)]
        elif name == "fsync":
            self._flushed.add(str(path))
        else:
            assert undo is not None
            changed = Path(others[0]) if name == "replace" else path
            self._unsafe.append((str(changed.parent), undo))
            if name == "replace" and str(path) in self._flushed:
                self._flushed.add(str(changed))
            self._flushed.discard(str(path))

    def lose_power(self) -> None:
        """The machine has ended: tear and lose what was not flushed."""
        self.mend()
        for _, undo in reversed(self._unsafe):
            if self._draw.random() < 0.5:
                undo()
        for path in [each for each in self.folder.rglob("*") if each.is_file() and str(each) not in self._flushed]:
            path.write_bytes(path.read_bytes()[:10])
        self._unsafe.clear()
