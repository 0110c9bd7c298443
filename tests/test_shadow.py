import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from roundelay import shadow
from roundelay.shadow import Shadow

PAGE = mmap.PAGESIZE
PAGES = 5


@pytest.fixture
def fd():
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGES * PAGE)
    yield fd
    os.close(fd)


def file_of(fd):
    """What is in the file, as a peer sees it."""
    return torch.frombuffer(mmap.mmap(fd, PAGES * PAGE), dtype=torch.uint8)


def whole(of):
    [view] = of.views([(0, torch.empty(PAGES * PAGE, dtype=torch.uint8))])
    return view


def exposed(fd):
    of = Shadow(fd, PAGES * PAGE)
    of.expose()
    return of, whole(of)


class Model:
    """The same in NumPy: a page is the file's until it is written to."""

    def __init__(self):
        self.file = np.zeros(PAGES * PAGE, np.uint8)
        self.written = {}

    def write_file(self, place, value):
        self.file[place : place + 9] = value

    def write_shadow(self, place, value):
        for k in range(place, min(place + 9, len(self.file))):
            page = self.written.setdefault(k // PAGE, self.file[k // PAGE * PAGE :][:PAGE].copy())
            page[k % PAGE] = value

    def forget(self):
        self.written = {}

    def keep(self):
        for page in range(PAGES):
            self.written.setdefault(page, self.file[page * PAGE :][:PAGE].copy())

    def shows(self):
        result = self.file.copy()
        for page, content in self.written.items():
            result[page * PAGE :][:PAGE] = content
        return result


place, value = st.integers(0, PAGES * PAGE - 9), st.integers(1, 255)
deeds = st.one_of(
    st.tuples(st.just("write_file"), place, value),
    st.tuples(st.just("write_shadow"), place, value),
    st.tuples(st.just("forget")),
    st.tuples(st.just("keep")),
)


@given(deeds=st.lists(deeds, max_size=12))
def test_whatever_is_done_it_shows_what_numpy_says(deeds):
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGES * PAGE)
    file, model = file_of(fd), Model()
    of, view = exposed(fd)
    for name, *arguments in deeds:
        if name == "write_file":
            file[arguments[0] : arguments[0] + 9] = arguments[1]
        elif name == "write_shadow":
            view[arguments[0] : arguments[0] + 9] = arguments[1]
        else:
            getattr(of, name)()
            of.expose()
        getattr(model, name)(*arguments)
        np.testing.assert_array_equal(view.numpy(), model.shows())
        np.testing.assert_array_equal(file.numpy(), model.file)
    os.close(fd)


def test_there_is_none_where_the_kernel_does_not_tell_which_pages_it_has_copied(fd, monkeypatch):
    monkeypatch.setattr(shadow, "_PAGEMAP", "/nowhere")
    with pytest.raises(FileNotFoundError):
        Shadow(fd, PAGES * PAGE)


def test_writes_in_a_row_are_counted(fd):
    of, view = exposed(fd)
    for expected in (1, 2, 0, 1):
        if expected:
            view[0] = 1
        of.forget()
        of.expose()
        assert of.writes == expected


def test_what_nobody_can_have_written_is_not_looked_for(fd, monkeypatch):
    of, _ = exposed(fd)
    of.forget()
    monkeypatch.setattr(of, "_is_written", lambda: pytest.fail("looked"))
    of.forget()


def test_pages_stay_where_they_are_if_nothing_was_written(fd):
    """To find them again after they were let go costs more than a copy."""
    of, view = exposed(fd)
    view.sum()
    assert not of._is_written()
    view[3 * PAGE] = 1
    assert of._is_written()


def test_views_have_the_kind_of_what_they_are_like_and_a_storage_of_their_own(fd):
    like = [torch.empty(3, 2), torch.empty(4, dtype=torch.float64), torch.empty(0, 7), torch.empty(())]
    offsets = [0, 64, 200, 300]
    views = Shadow(fd, PAGES * PAGE).views(list(zip(offsets, like, strict=True)))
    file_of(fd)[64:96].view(torch.float64).fill_(2.5)
    assert [(view.shape, view.dtype) for view in views] == [(tensor.shape, tensor.dtype) for tensor in like]
    assert (views[1] == 2.5).all()
    assert [view.untyped_storage().nbytes() for view in views] == [24, 32, 0, 4]
    assert views[0]._base is None, "which would keep a second user of the storage"


def test_it_needs_no_file_descriptor_once_it_is_gone(fd):
    before = len(os.listdir("/proc/self/fd"))
    of = Shadow(fd, PAGES * PAGE)
    view = whole(of)
    del of
    file_of(fd).fill_(7)
    assert (view == 7).all(), "views keep the memory"
    del view
    assert len(os.listdir("/proc/self/fd")) == before
