"""Messages between the router and its instances: msgspec over ZeroMQ, one socket on each side."""

from __future__ import annotations

import logging

import msgspec
import zmq
import zmq.asyncio

from staffel.control.messages import Beat, FromInstance, Hello, Order, Report, Unable

log = logging.getLogger("staffel.links")


class InstanceLink:
    """An instance's end: orders come in, everything else goes out."""

    def __init__(self, endpoint: str, instance: str, lifeline: int) -> None:
        """`lifeline` is a file descriptor that reads end-of-file when the instance is to stop."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, instance.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(endpoint)
        self._lifeline = lifeline
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Hello | Report | Unable) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_ms: int) -> list[Order] | None:
        """All orders that are there, after waiting for the first; None: the lifeline is cut."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._lifeline in ready:
            return None
        orders: list[Order] = []
        while self._socket in ready and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            orders.append(self._decoder.decode(self._socket.recv()))
        return orders

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class BeatLink:
    """A second way out of an instance, for the thread that tells of its life."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def send(self, beat: Beat) -> None:
        self._socket.send(msgspec.msgpack.encode(beat))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class RouterLink:
    """The router's end, for asyncio."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A restarted instance takes its predecessor's name over.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(endpoint)
        self._decoder: msgspec.msgpack.Decoder[FromInstance] = msgspec.msgpack.Decoder(FromInstance)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, instance: str, order: Order) -> None:
        """Queue an order; those for an instance that is gone are dropped."""
        self._socket.send_multipart([instance.encode(), self._encoder.encode(order)])

    async def receive(self) -> FromInstance:
        """The next message; what is none, from whoever found the socket, is dropped."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                _, payload = frames
                return self._decoder.decode(payload)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("a message that no instance sends was dropped: %s", error)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
