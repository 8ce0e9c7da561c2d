"""`TcpStream`: one authenticated connection of the TCP mover, with blocking calls that end at a deadline.

Both ends prove that they have the cluster's secret, over both names, epochs and fresh random numbers, and so nobody
else can connect, listen, or replay. Every later frame has an authentication code over its number in the stream.
Payload bytes are not encrypted; their XXH3-64 travels in an authenticated frame. That finds every damage, but is no
proof against somebody on the path who changes payloads on purpose: such networks need a tunnel.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.kernel.errors import TransferError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.tcp.tcp_frames import (
    FRAME_MAX,
    VERSION,
    CallerHello,
    CallRefusal,
    Challenge,
    Frame,
    Proof,
    Ready,
    ToCaller,
    ToListener,
)

LATE_SECONDS = 0.02
"""How long a time-out that was set in the kernel is used again, which spares two calls of it for each other one."""
HANDSHAKE_SECONDS = 5.0
"""Time for a handshake: a stranger that sends nothing may not keep a thread for longer."""
STEP_BYTES = 256 << 10
"""Of a payload, checked and moved one after the other: they are still in the processor's cache for the second."""
_HANDSHAKE_MAX = 2048
"""Bytes of a frame from somebody who is not known yet."""
_CODE = 16
_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_PURPOSE = "transfer tcp"

_encoder = msgspec.msgpack.Encoder()
_listener_decoder = msgspec.msgpack.Decoder(ToListener)
_caller_decoder = msgspec.msgpack.Decoder(ToCaller)


class StreamEnded(TransferError):
    """The other end is gone, or the connection can't be used any more. ``clean``: it ended between two frames."""

    def __init__(self, message: str, *, clean: bool = False) -> None:
        super().__init__(message)
        self.clean = clean


class StreamLate(TransferError):
    """The deadline came first; the connection can't be used any more."""


class StreamRefused(TransferError):
    """One end does not accept the other: another secret, name or version."""


class PeerIdentity(NamedTuple):
    """Who is at the other end. ``epoch``: number of its life."""

    name: str
    epoch: int


class TcpStream:
    """An open connection. Not for several threads, but for `close`, which wakes a thread that waits in a call.

    Args:
        listener: this end has accepted the connection.
    """

    def __init__(self, sock: socket.socket, *, listener: bool) -> None:
        self._socket = sock
        self._decoder = _listener_decoder if listener else _caller_decoder
        self._deadline: float | None = None
        self._armed = 0.0
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = 0
        self._received = 0
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def expire_at(self, deadline: float | None) -> None:
        """Set when calls give up, by `time.monotonic`; None waits for ever. They are late by `LATE_SECONDS` at most."""
        self._deadline = deadline
        self._armed = 0.0
        if deadline is None:
            self._set_timeout(0.0)

    def _arm(self) -> None:
        """Before each call: let it end at the deadline."""
        if self._deadline is None:
            return
        now = time.monotonic()
        if now - self._armed > LATE_SECONDS:
            if self._deadline <= now:
                raise StreamLate("the deadline has passed")
            self._set_timeout(self._deadline - now)
            self._armed = now

    def _set_timeout(self, left: float) -> None:
        # The kernel's own time-outs leave the socket blocking, so that MSG_WAITALL fills a whole buffer in one call.
        # Rounded up to 1 us, because 0 waits for ever.
        wait = _TIMEVAL.pack(int(left), max(int(left % 1 * 1e6), 1 if left else 0))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        except OSError as error:
            raise StreamEnded(f"the connection is closed: {error.strerror}") from error

    def authenticate(self, keys: tuple[bytes, bytes]) -> None:
        """Begin to put codes on frames: the keys of what is sent and of what is received."""
        self._keys = keys

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            StreamEnded, StreamLate: see there.
        """
        body = _encoder.encode(frame)
        code = b""
        if self._keys is not None:
            code = _authentication_code(self._keys[0], self._sent, body)
            self._sent += 1
        self._send(_LENGTH.pack(len(body) + len(code)) + body + code)

    def send_payload(self, payload: memoryview, *, check: bool = True) -> int:
        """Send bytes as they are; return their XXH3-64, or 0 without ``check``. Errors as of `send`."""
        if not check:
            self._send(payload)
            return 0
        if len(payload) <= STEP_BYTES:
            checksum = xxh3_64_intdigest(payload)
            self._send(payload)
            return checksum
        digest = xxh3_64()
        for start in range(0, len(payload), STEP_BYTES):
            step = payload[start : start + STEP_BYTES]
            digest.update(step)
            self._send(step)
        return digest.intdigest()

    def take_payload(self, payload: memoryview) -> int:
        """Receive bytes into a buffer until it is full; return their XXH3-64. Errors as of `receive`."""
        if len(payload) <= STEP_BYTES:
            self._fill(payload)
            return xxh3_64_intdigest(payload)
        digest = xxh3_64()
        for start in range(0, len(payload), STEP_BYTES):
            step = payload[start : start + STEP_BYTES]
            self._fill(step)
            digest.update(step)
        return digest.intdigest()

    def _send(self, rest: memoryview | bytes) -> None:
        while rest:
            self._arm()
            try:
                count = self._socket.send(rest)
            except BlockingIOError as error:
                raise StreamLate("the peer took no bytes until the deadline") from error
            except OSError as error:
                raise StreamEnded(f"the connection broke while sending: {error.strerror}") from error
            if count == len(rest):
                return
            rest = memoryview(rest)[count:]

    def receive(self) -> Frame:
        """Return the next frame.

        Raises:
            StreamEnded: also for a frame that is too long, is no frame, or has a wrong code.
            StreamLate: see there.
        """
        head = bytearray(_LENGTH.size)
        self._fill(memoryview(head), clean=True)
        (length,) = _LENGTH.unpack(head)
        if length > (FRAME_MAX if self._keys else _HANDSHAKE_MAX):
            raise StreamEnded(f"a frame of {length} bytes is too long")
        data = memoryview(bytearray(length))
        self._fill(data)
        if self._keys is not None:
            data, code = data[:-_CODE], data[-_CODE:]
            if not hmac.compare_digest(code, _authentication_code(self._keys[1], self._received, data)):
                raise StreamEnded("a frame has a wrong authentication code")
            self._received += 1
        try:
            frame: Frame = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise StreamEnded(f"what arrived is not a frame: {error}") from error
        return frame

    def _fill(self, view: memoryview, *, clean: bool = False) -> None:
        while view:
            self._arm()
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise StreamLate("the peer sent nothing until the deadline") from error
            except OSError as error:
                raise StreamEnded(f"the connection broke while receiving: {error.strerror}") from error
            if not count:
                raise StreamEnded("the peer closed the connection", clean=clean)
            view = view[count:]
            clean = False

    def close(self) -> None:
        """Close the connection, from any thread."""
        try:
            # A thread that waits in a call wakes from this; it would not from close alone.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer closed it first
        self._socket.close()


def call(stream: TcpStream, secret: ClusterSecret, me: PeerIdentity, deadline: float) -> PeerIdentity:
    """Prove to a listener who we are, until a deadline by `time.monotonic`; return who it is.

    Raises:
        StreamRefused: it has another secret, or refuses us.
        StreamEnded, StreamLate: see there.
    """
    stream.expire_at(deadline)
    hello = CallerHello(VERSION, me.name, me.epoch, secrets.token_bytes(32))
    stream.send(hello)
    answer = stream.receive()
    if isinstance(answer, CallRefusal):
        raise StreamRefused(answer.reason)
    if not isinstance(answer, Challenge):
        raise StreamEnded("the listener did not answer with a challenge")
    keys = _Keys(secret, hello, PeerIdentity(answer.name, answer.epoch), answer.nonce)
    if not hmac.compare_digest(answer.proof, keys.listener_proof):
        raise StreamRefused("the listener has another cluster secret")
    stream.send(Proof(keys.caller_proof))
    stream.authenticate((keys.to_listener, keys.to_caller))
    ready = stream.receive()
    if not isinstance(ready, Ready):
        raise StreamEnded("the listener is not ready")
    stream.expire_at(None)
    return PeerIdentity(answer.name, answer.epoch)


def answer_call(stream: TcpStream, secret: ClusterSecret, me: PeerIdentity) -> PeerIdentity:
    """Let a caller prove who it is; return that.

    Raises:
        StreamRefused: it has another secret or version.
        StreamEnded, StreamLate: see there.
    """
    stream.expire_at(time.monotonic() + HANDSHAKE_SECONDS)
    hello = stream.receive()
    if not isinstance(hello, CallerHello):
        raise StreamEnded("the caller did not say hello")
    if hello.version != VERSION:
        reason = f"version {hello.version} of the TCP mover; {me.name} has {VERSION}"
        stream.send(CallRefusal(reason))
        raise StreamRefused(reason)
    nonce = secrets.token_bytes(32)
    keys = _Keys(secret, hello, me, nonce)
    stream.send(Challenge(me.name, me.epoch, nonce, keys.listener_proof))
    proof = stream.receive()
    if not isinstance(proof, Proof) or not hmac.compare_digest(proof.proof, keys.caller_proof):
        raise StreamRefused(f"{hello.name!r} has another cluster secret")
    stream.authenticate((keys.to_caller, keys.to_listener))
    stream.send(Ready())
    stream.expire_at(None)
    return PeerIdentity(hello.name, hello.epoch)


class _Keys:
    """Proofs and keys of one connection. Each has a label, so that none can be sent back as another."""

    def __init__(self, secret: ClusterSecret, hello: CallerHello, listener: PeerIdentity, nonce: bytes) -> None:
        key = secret.derive(_PURPOSE)
        transcript = _encoder.encode((hello, listener.name, listener.epoch, nonce))
        labels = (b"listener proof", b"caller proof", b"to listener", b"to caller")
        self.listener_proof, self.caller_proof, self.to_listener, self.to_caller = (
            hashlib.blake2b(transcript, digest_size=32, key=key, person=label).digest() for label in labels
        )


def _authentication_code(key: bytes, number: int, body: bytes | memoryview) -> bytes:
    mac = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=_CODE, key=key)
    mac.update(body)
    return mac.digest()
