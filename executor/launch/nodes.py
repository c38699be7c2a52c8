"""Connects the launchers of a job on several nodes, so that all start the same job and end with the same error.

Node 0 listens on the port after that of torchrun's store, the other nodes connect to it. Messages are lines of JSON. A
node sends at least one every second, so that a node that is lost without closing its connection is noticed as well.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from executor.launch.rank_failures import RankFailed, RankRefused, RunFailed, RunTimedOut
from plans.errors import TwofoldError
from plans.reading import json_of

__all__ = ["ONE_NODE", "NodeConnections", "Nodes", "refusing"]

LOOPBACK = "127.0.0.1"
BEAT_S = 1.0
LOST_S = 10.0
VERDICT_S = 5.0  # after the first failure, for nodes that know the cause and are still ending their ranks
RETRY_S = 0.1
LATE_S = 2.0
_MOST_BYTES = 1 << 28  # of a message, which may hold a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of a job and where their ranks meet.

    Args:
        num_nodes: machines.
        node_rank: the number of this one, from 0.
        master_addr: address of node 0.
        port: of torchrun's store on node 0; None, on one machine only, picks a free one. Launchers of several nodes
            use the next port too.
        join_s: how long nodes wait for each other at the start.
        least_nodes: the job starts with this many nodes if the others have not joined after `wait_s`; None: with all
            nodes only. Node 0 is always one of them.
        wait_s: see `least_nodes`.
        facts: what must be equal on all of them, by name, such as the digest of a plan.
        offer: what this node tells the others at the start, in JSON's types.
        refusal: why this node cannot start; the other nodes end with the same error.
    """

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    port: int | None = None
    join_s: float = 300.0
    least_nodes: int | None = None
    wait_s: float = 30.0
    facts: Mapping[str, str] = field(default_factory=dict)
    offer: Any = None
    refusal: str = ""


ONE_NODE = Nodes()
"""This machine alone, at a free port."""


class _NodeLost(RunFailed):
    """The launcher of another node is gone or silent."""


@dataclass(slots=True)
class _Peer:
    """The connection to another node, and the messages received from it."""

    node: int
    connection: socket.socket
    heard_s: float
    rest: bytes = b""
    is_closed: bool = False
    facts: dict[str, str] | None = None
    offer: Any = None
    refusal: str = ""
    has_ended: bool = False
    error: dict[str, Any] | None = None
    verdict: dict[str, Any] | None = None
    asks_to_stop: bool = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a peer that is gone is noticed when it is read from."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> None:
        """Process the messages that have arrived."""
        while True:
            try:
                found = self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found or len(self.rest) > _MOST_BYTES:
                self.is_closed = True
                return
            self.heard_s = time.monotonic()
            *lines, self.rest = (self.rest + found).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            message = json_of(line, "a message of another node")
            if "node" in message:
                self.node, self.facts = int(message["node"]), dict(message["facts"])
                self.offer, self.refusal = message["offer"], str(message["refusal"])
            self.error = message.get("failed", self.error)
            if "ended" in message:
                self.has_ended, self.error = True, message["ended"]
            self.verdict = message.get("verdict", self.verdict)
            self.asks_to_stop |= "stop" in message
        except (ValueError, TypeError, KeyError, AttributeError):
            self.is_closed = True  # no launcher of ours

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed or nothing was received for `LOST_S`."""
        return self.is_closed or time.monotonic() - self.heard_s > LOST_S


class NodeConnections:
    """The connections of this node to the other nodes of a job; none if there is one node.

    Args:
        nodes: of the job.

    Attributes:
        joined: numbers of the nodes that joined, in order.
        offers: what each of them told the others.

    Raises:
        TwofoldError: a node that does not join or cannot start, a node number used twice, different facts. Every node
            raises it.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._peers, self._beat_s = nodes, list[_Peer](), 0.0
        self.joined, self.offers = tuple(range(nodes.num_nodes)), (nodes.offer,)
        if nodes.num_nodes == 1:
            return
        assert nodes.port is not None
        self._where = (nodes.master_addr, nodes.port + 1)
        try:
            refusal = self._gather() if nodes.node_rank == 0 else self._join()
        except BaseException:
            self.close()
            raise
        if refusal is not None:
            self.close()
            raise TwofoldError(refusal)

    @property
    def nodes(self) -> Nodes:
        """The nodes that joined, numbered from 0 without gaps."""
        place = self.joined.index(self._nodes.node_rank)
        return replace(self._nodes, num_nodes=len(self.joined), node_rank=place)

    def failure(self) -> RunFailed | None:
        """That another node is lost or failed, else None; to be called at least once a second while ranks run.

        The loss of a node is a cause, which stays one if the node speaks again; `agreed` gives the causes of others.
        """
        self._exchange()
        for peer in self._peers:
            if peer.is_lost and peer.error is None:
                return self._lost(peer)
        if not any(peer.error is not None or peer.asks_to_stop for peer in self._peers):
            return None
        error = RunFailed("another node failed")
        error.is_consequence = True
        return error

    def tell(self, error: TwofoldError | None) -> None:
        """Tell the other nodes the cause of a failure here, before the ranks of this node have ended.

        That may take longer than the others wait for this node.
        """
        if error is not None and not _is_consequence(error):
            for peer in self._peers:
                peer.send({"failed": _as_message(error, self._nodes.node_rank)})

    def agreed(self, error: TwofoldError | None) -> TwofoldError | None:
        """The error of the job, the same on every node, from this node's error or None; waits for the other nodes.

        Errors that are causes win over errors that may be consequences (`RunFailed.is_consequence`).
        """
        if not self._peers:
            return error
        if self._nodes.node_rank == 0:
            return self._judge(error)
        (first,) = self._peers
        first.send({"ended": _as_message(error, self._nodes.node_rank)})
        while first.verdict is None:
            self._exchange()
            if first.verdict is None and first.is_lost:
                if error is not None and not _is_consequence(error):
                    return error
                first.verdict = first.error or _as_message(self._lost(first), 0)
            time.sleep(RETRY_S / 2)
        return _from_message(first.verdict, self._nodes.node_rank, error)

    def close(self) -> None:
        """Close the connections; other nodes find this one lost unless they have agreed."""
        for peer in self._peers:
            peer.connection.close()
        self._peers.clear()

    def _gather(self) -> str | None:
        """On node 0: wait for all nodes. Returns why the job cannot start, or None."""
        begun_s = time.monotonic()
        deadline_s = begun_s + self._nodes.join_s
        try:
            server = socket.create_server(self._where)
        except OSError as error:
            raise TwofoldError(
                f"node 0 cannot listen on {_place(self._where)}: {error.strerror or error}; its launchers meet at the "
                "port after that of the rendezvous, choose another one"
            ) from None
        with server, selectors.DefaultSelector() as ready:
            server.setblocking(False)
            ready.register(server, selectors.EVENT_READ)
            while True:
                for peer in self._peers:
                    peer.read()
                self._peers = [peer for peer in self._peers if not peer.is_closed]
                known = {peer.node: peer for peer in self._peers if peer.facts is not None}
                missing = set(range(1, self._nodes.num_nodes)) - known.keys()
                refusal = self._differing([peer for peer in self._peers if peer.facts is not None])
                if refusal is not None:  # nodes that are about to connect must learn the reason too
                    deadline_s = min(deadline_s, time.monotonic() + LATE_S)
                waited_s, least = time.monotonic() - begun_s, self._nodes.least_nodes
                is_enough = least is not None and len(known) + 1 >= least and waited_s > self._nodes.wait_s
                if not missing or is_enough or time.monotonic() > deadline_s:
                    if refusal is None and missing and not is_enough:
                        said = " and ".join(map(str, sorted(missing)))
                        refusal = (
                            f"node {said} did not join within {self._nodes.join_s:g} s; start the job on every node"
                        )
                    self.joined = (0, *sorted(known))
                    self.offers = (self._nodes.offer, *(known[node].offer for node in self.joined[1:]))
                    for peer in self._peers:
                        peer.send({"verdict": {"text": refusal, "joined": self.joined, "offers": self.offers}})
                        peer.heard_s = time.monotonic()  # nodes send nothing while they wait
                    return refusal
                if ready.select(RETRY_S):
                    connection, _ = server.accept()
                    connection.setblocking(True)
                    self._peers.append(_Peer(-1, connection, time.monotonic()))

    def _differing(self, peers: list[_Peer]) -> str | None:
        numbers = [peer.node for peer in peers]
        for node, text in ((0, self._nodes.refusal), *((peer.node, peer.refusal) for peer in peers)):
            if text:
                return f"on node {node}: {text}"
        for peer in peers:
            if not 0 < peer.node < self._nodes.num_nodes or numbers.count(peer.node) > 1:
                return f"there are two launchers of node {peer.node}; give every machine a node number of its own"
            for name, mine in self._nodes.facts.items():
                if (theirs := (peer.facts or {}).get(name)) != mine:
                    return f"node {peer.node} has {name} {theirs}, node 0 has {mine}; start the same on every node"
        return None

    def _join(self) -> str | None:
        """On another node: wait for the verdict of node 0. Returns why the job cannot start, or None.

        A node that is late for an elastic job waits for its next restart, also if it only just missed the start.
        """
        deadline_s, place = time.monotonic() + self._nodes.join_s, _place(self._where)
        while True:
            peer = self._connected(deadline_s, place)
            while peer.verdict is None and not peer.is_closed and time.monotonic() < deadline_s + LOST_S:
                time.sleep(RETRY_S)
                peer.read()
            verdict = peer.verdict or {"text": f"node 0 at {place} ended before all nodes had joined", "joined": ()}
            is_late = self._nodes.node_rank not in verdict["joined"] and (peer.verdict is None or not verdict["text"])
            if not is_late or self._nodes.least_nodes is None or time.monotonic() > deadline_s:
                break
            self.close()
        peer.verdict, peer.heard_s = None, time.monotonic()
        if verdict["text"] is not None:
            return str(verdict["text"])
        self.joined, self.offers = tuple(verdict["joined"]), tuple(verdict["offers"])
        if is_late:
            return f"the job started on the nodes {self.joined} before node {self._nodes.node_rank} had joined"
        return None

    def _connected(self, deadline_s: float, place: str) -> _Peer:
        """Node 0, which has been told about this node."""
        while True:
            try:
                connection = socket.create_connection(self._where, timeout=2.0)
                break
            except socket.gaierror as error:
                raise TwofoldError(f"there is no host {self._where[0]!r} for node 0: {error.strerror}") from None
            except OSError:
                if time.monotonic() > deadline_s:
                    raise TwofoldError(f"node 0 did not answer at {place} within {self._nodes.join_s:g} s") from None
                time.sleep(RETRY_S)
        connection.settimeout(None)
        peer, here = _Peer(0, connection, time.monotonic()), self._nodes
        self._peers.append(peer)
        peer.send({"node": here.node_rank, "facts": dict(here.facts), "offer": here.offer, "refusal": here.refusal})
        return peer

    def _exchange(self) -> None:
        now_s = time.monotonic()
        for peer in self._peers:
            if now_s - self._beat_s > BEAT_S:
                peer.send({})
            peer.read()
        if now_s - self._beat_s > BEAT_S:
            self._beat_s = now_s

    def _judge(self, error: TwofoldError | None) -> TwofoldError | None:
        """On node 0: wait for all nodes, choose the error and send it to them."""
        mine, failed_s = _as_message(error, 0), None if error is None else time.monotonic()
        while True:
            self._exchange()
            for peer in self._peers:
                if peer.is_lost and not peer.has_ended:
                    peer.has_ended, peer.error = True, peer.error or _as_message(self._lost(peer), peer.node)
            errors = [each for each in (mine, *(peer.error for peer in self._peers)) if each is not None]
            if errors and failed_s is None:
                failed_s = time.monotonic()
            running = [peer for peer in self._peers if not peer.has_ended]
            if not running or (failed_s is not None and time.monotonic() - failed_s > VERDICT_S):
                break
            for peer in running if errors else ():
                peer.send({"stop": True})
            time.sleep(RETRY_S)
        chosen = min(errors, key=lambda each: each["is_consequence"], default={})
        for peer in self._peers:
            peer.send({"verdict": chosen})
        return _from_message(chosen, 0, error)

    def _lost(self, peer: _Peer) -> _NodeLost:
        how = "closed its connection" if peer.is_closed else f"sent nothing for {LOST_S:g} s"
        return _NodeLost(f"node {peer.node} was lost: its launcher {how}")


@contextlib.contextmanager
def refusing(nodes: Nodes) -> Iterator[None]:
    """Tell the other nodes about an error of this node that comes up before they meet, so that none waits for it."""
    try:
        yield
    except TwofoldError as error:
        if nodes.num_nodes > 1 and nodes.port is not None:
            with contextlib.suppress(TwofoldError):  # the refusal, or nobody to tell
                NodeConnections(replace(nodes, join_s=min(nodes.join_s, LOST_S), refusal=str(error))).close()
        raise


def _place(where: tuple[str, int]) -> str:
    return f"{where[0]} port {where[1]}"


def _is_consequence(error: TwofoldError) -> bool:
    return isinstance(error, RunFailed) and error.is_consequence


def _as_message(error: TwofoldError | None, node: int) -> dict[str, Any] | None:
    """An error as a message that names its node."""
    if error is None:
        return None
    where = "" if isinstance(error, _NodeLost) else f"on node {node}: "  # a loss names the lost node
    return {
        "node": node, "text": f"{where}{error}", "kind": type(error).__name__, "rank": getattr(error, "rank", None),
        "exit_code": error.exit_code, "is_consequence": _is_consequence(error),
    }  # fmt: skip


def _from_message(told: Mapping[str, Any], here: int, own: TwofoldError | None) -> TwofoldError | None:
    """The error of a message; an error of this node is returned unchanged."""
    if not told:
        return None
    if told["node"] == here and own is not None:
        return own
    if told["kind"] == RankRefused.__name__:
        return RankRefused(told["text"], rank=told["rank"], exit_code=told["exit_code"])
    if told["kind"] == RankFailed.__name__:
        return RankFailed(told["text"], rank=told["rank"])
    if told["kind"] == RunTimedOut.__name__:
        return RunTimedOut(told["text"])
    if told["kind"] in (RunFailed.__name__, _NodeLost.__name__):
        return RunFailed(told["text"])
    return TwofoldError(told["text"])  # before ranks started: a restart would not help
