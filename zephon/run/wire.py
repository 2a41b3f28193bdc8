"""Messages between our own processes: pickles over a Unix socket, with arrays handed over in anonymous shared memory.

Arrays travel out of band (pickle protocol 5) in one memory file a message, whose descriptor rides along. The receiver
maps it: no copy. A memory file has no name, so the kernel frees it with the last process that knows it, however that
process ends: nothing is ever left behind.
"""

import contextlib
import errno
import mmap
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, bytes of the memory file
_SIZES = struct.Struct("<Q")
_INLINE = 64 * 1024  # arrays smaller than this in all are cheaper inside the pickle than in a memory file
_ALIGN = 64

ALIVE = "alive"
LINGER = 3.0
"""Seconds that a process may take to end by itself once the other side has gone."""

SLICES = 10
"""Signs of life that must be missing."""


def send(link: socket.socket, message: Any) -> None:
    """Send any picklable object.

    Raises:
        OSError: the other side has gone.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    if sum(raw.nbytes for raw in raws) < _INLINE:
        body, raws = pickle.dumps(message, protocol=5), []
    total, places = 0, list[int]()
    for raw in raws:
        places.append(total)
        total += -(-raw.nbytes // _ALIGN) * _ALIGN
    sizes = b"".join(_SIZES.pack(raw.nbytes) for raw in raws)
    payload = _SIZES.pack(len(raws)) + sizes + body
    head = _HEAD.pack(len(payload), total)
    if not total:
        link.sendall(head + payload)
        return
    file = os.memfd_create("zephon", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, total)
        for raw, place in zip(raws, places, strict=True):
            done = 0
            while done < raw.nbytes:
                done += os.pwrite(file, raw[done:], place + done)
        socket.send_fds(link, [head], [file])
    finally:
        os.close(file)
    link.sendall(payload)


def receive(link: socket.socket) -> Any:
    """Wait for the next message; its arrays lie in shared memory, are writable, and free it when they are gone.

    Raises:
        EOFError: the other side has gone.
        OSError: this process lacks what the message takes, a free file descriptor say; the link is of no more use.
    """
    head, files = b"", list[int]()
    try:
        while len(head) < _HEAD.size:
            part, some, _, _ = socket.recv_fds(link, _HEAD.size - len(head), 1, socket.MSG_CMSG_CLOEXEC)
            files += some
            if not part:
                raise EOFError("the other process has gone")
            head += part
        length, total = _HEAD.unpack(head)
        if total and not files:  # the kernel drops a descriptor for which there is no place
            raise OSError(errno.EMFILE, "Too many open files: no descriptor was free for the arrays of a message")
        memory = memoryview(mmap.mmap(files[0], total)) if total else memoryview(b"")
    finally:
        for file in files:
            os.close(file)
    payload = _exactly(link, length)
    count = _SIZES.unpack_from(payload)[0]
    sizes = struct.unpack_from(f"<{count}Q", payload, _SIZES.size)
    buffers: list[memoryview] = []
    place = 0
    for size in sizes:
        buffers.append(memory[place : place + size])
        place += -(-size // _ALIGN) * _ALIGN
    return pickle.loads(memoryview(payload)[_SIZES.size * (count + 1) :], buffers=buffers)


def wait(link: socket.socket, timeout: float) -> None:
    """Return when there is something to receive.

    Args:
        link: our end.
        timeout: seconds, 0 for ever; they pass in slices, so that a whole job that is stopped and goes on later does
            not take the other side for one that hangs.

    Raises:
        EOFError: our end has been closed.
        TimeoutError: there is nothing.
    """
    poll = select.poll()
    try:
        poll.register(link, select.POLLIN)
    except ValueError as error:  # another thread has hung up since the last message
        raise EOFError("the link has been closed") from error
    if timeout and not any(poll.poll(1000 * timeout / SLICES) for _ in range(SLICES)):
        raise TimeoutError


def show_life(send: Callable[[Any], None], timeout: float) -> None:
    """Send signs of life until the other side has gone, in a thread that ends with the process.

    Then it ends the process too, if that does not do so by itself: it hangs over work that nobody waits for.
    """

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                send(ALIVE)
                time.sleep(timeout / SLICES)
        time.sleep(LINGER)
        os._exit(1)

    if timeout:
        threading.Thread(target=beat, name="zephon-life", daemon=True).start()


def _exactly(link: socket.socket, length: int) -> bytearray:
    payload = bytearray(length)
    view = memoryview(payload)
    done = 0
    while done < length:
        got = link.recv_into(view[done:])
        if not got:
            raise EOFError("the other process has gone")
        done += got
    return payload


def hang_up(link: socket.socket) -> None:
    """Close a link so that the other side notices at once, even where a thread of ours waits on it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
