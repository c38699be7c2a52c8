"""Which uses of memory on streams are not ordered: the oracle of the tests for events between streams.

It is given what a device was told, in the order of the host (`StreamLog`), and the program. It knows nothing about how
events were chosen: from the log alone it draws the graph of what happens before what, closes it transitively, and asks
for every two uses of one memory, one of them a write, and for every use of memory that is given out again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from executor.device import Device
from plans.program import Kind, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLog(Device):
    """A CPU that has streams in name: it notes which stream is current, records events and waits for them.

    Args:
        lines: ("run", what, stream), ("record", event, stream) and ("wait", event, stream), in the order of the host.
        now: the current stream, and how many streams and events there are.
    """

    kind: str = "cpu"
    lines: list = field(default_factory=list)
    now: dict = field(default_factory=lambda: {"stream": "main", "streams": 0, "events": 0})

    @property
    def has_streams(self):
        return True

    def stream(self):
        self.now["streams"] += 1
        return f"side {self.now['streams']}"

    def current_stream(self):
        return self.now["stream"]

    def set_stream(self, stream):
        assert stream is not None
        self.now["stream"] = stream

    def point(self):
        self.now["events"] += 1
        self.lines.append(("record", self.now["events"], self.now["stream"]))
        return self.now["events"]

    def wait_for(self, point):
        if point is not None:
            self.lines.append(("wait", point, self.now["stream"]))

    def ran(self, what):
        self.lines.append(("run", what, self.now["stream"]))


class _Graph:
    """Nodes with bit sets of all nodes before them."""

    def __init__(self):
        self.before = []

    def add(self, *after):
        bits = 0
        for node in after:
            if node is not None:
                bits |= self.before[node] | 1 << node
        self.before.append(bits)
        return len(self.before) - 1

    def ordered(self, first, second):
        return first == second or bool(self.before[second] >> first & 1)


@dataclass
class _Held:
    """One memory: its uses, (node, whether it writes), the streams that it was taken on, names and communication."""

    uses: list = field(default_factory=list)
    owners: set = field(default_factory=set)
    names: set = field(default_factory=set)
    in_flight: int = 0
    is_kept: bool = False


def races(group, rank, lines):
    """What is not ordered, in words; `lines` of a `StreamLog` whose runs are positions in the program's order."""
    return _Races(group, rank).find(lines)


class _Races:
    def __init__(self, group, rank):
        self.group, self.rank, self.walk = group, rank, list(group.walk())
        self.graph, self.last, self.events = _Graph(), {}, {}
        self.held, self.issued, self.channels = {}, {}, {}
        self.own = defaultdict(lambda: ([], [0]))  # channel -> what this rank sent to itself, how many it receives
        self.given_back = defaultdict(list)  # stream -> (what, nodes) that its next instruction must come after
        self.found = []

    def find(self, lines):
        begun = self.graph.add()
        self.last["main"] = begun
        ran = []
        for what, which, stream in lines:
            if what == "record":
                self.events[which] = self.last.get(stream)
            elif what == "wait":
                self.last[stream] = self.graph.add(self.last.get(stream), self.events[which])
            else:
                ran.append(self._run(which, stream))
                if not self.graph.ordered(begun, ran[-1]):
                    self.found.append(f"{self._id(which)} does not wait for the step to begin")
        assert len(ran) == len(self.walk), "not every instruction ran"
        end = self.graph.add(self.last["main"])
        self.found += [f"{self._id(at)} may end after the step" for at, node in enumerate(ran)
                       if not self.graph.ordered(node, end)]  # fmt: skip
        return self.found

    def _id(self, position):
        block, instruction = self.walk[position]
        return f"{block.label}/{instruction.name}"

    def _run(self, position, stream):
        block, each = self.walk[position]
        node = self.last[stream] = self.graph.add(self.last.get(stream))
        for what, uses in self.given_back.pop(stream, ()):
            for use in uses:
                if not self.graph.ordered(use, node):
                    self.found.append(f"{self._id(position)} may take the memory of {what} while it is used")
        at = each.attrs.get("micro_batch", block.micro_batch) if each.kind is Kind.WAIT else block.micro_batch
        if each.kind is Kind.WAIT:
            self._arrive((each.waits, self._at(each.waits, at)), node, stream, position)
        else:
            self._issue(each, at, node, stream, position)
        for name in each.frees:
            memory = self._memory(name, at)
            memory.names.discard(name)
            self._drop(memory, name)
        return node

    def _issue(self, each, at, node, stream, position):
        reads = [(name, self._memory(name, at)) for name in each.inputs]
        writes = [(name, self._memory(name, at)) for name in each.outputs]
        for name, memory in writes:
            memory.owners = memory.owners or {stream}
            memory.names.add(name)
        if each.kind is Kind.COMPUTE or each.token is None:
            for name, memory in reads:
                self._use(memory, node, False, name, position)
            for name, memory in writes:  # what compute makes in the memory of another value is a view of it
                is_view = each.kind is Kind.COMPUTE and self.group.values[name].shares is not None
                self._use(memory, node, not is_view, name, position)
            return
        # the communication itself: behind this point of the stream, and the one before it on its channel
        channel = (each.channel, each.kind)
        links, own = self._links(each)
        moved = node
        if links:
            moved = self.channels[channel] = self.graph.add(node, self.channels.get(channel))
        elif each.kind is Kind.RECV:
            moved = None  # nothing comes before the WAIT
        sent, received = self.own[each.channel]
        number = None
        if own and each.kind is Kind.SEND:
            sent.append((node, stream))
        elif own:
            number = received[0]
            received[0] += 1
        for name, memory in reads:
            self._use(memory, node, False, name, position)
            self._use(memory, moved, False, name, position)
            memory.in_flight += 1
        for name, memory in writes:
            if moved is not None:
                self._use(memory, moved, True, name, position)
            memory.in_flight += 1
        mine = None if number is None else (sent, number)
        self.issued[each.token, self._at(each.token, at)] = (
            node,
            moved if links else None,
            mine,
            stream,
            reads,
            writes,
        )

    def _arrive(self, token, node, stream, position):
        if token not in self.issued:
            return  # the first WAIT has done it
        issue, moved, mine, issuer, reads, writes = self.issued.pop(token)
        if moved is not None:  # what moves between ranks is waited for by the stream
            self.graph.before[node] |= self.graph.before[moved] | 1 << moved
        if mine is not None:
            sent, sender = mine[0][mine[1]]
            if not self.graph.ordered(sent, node):
                self.found.append(f"{self._id(position)} may take its message before it is sent")
            if sender != stream:
                self.given_back[sender].append((f"the message of {token[0]}", [node]))
        if not self.graph.ordered(issue, node):
            self.found.append(f"{self._id(position)} may run before what it waits for is issued")
        if issuer != stream:
            self.given_back[issuer].append((f"the buffers of {token[0]}", [node]))
        for name, memory in reads:
            self._use(memory, node, False, name, position)
            memory.in_flight -= 1
            self._drop(memory, name)
        for name, memory in writes:
            memory.owners.add(stream)
            self._use(memory, node, True, name, position)
            memory.in_flight -= 1
            self._drop(memory, name)

    def _links(self, each):
        """Whether it moves something between ranks, and whether from this rank to itself."""
        if each.kind is Kind.COLLECTIVE:
            return len(self.group.members(each, self.rank)) > 1, False
        mine = [piece for piece in each.pieces if self.rank in (piece.src_rank, piece.dst_rank)]
        return any(not piece.is_local for piece in mine), any(piece.is_local for piece in mine)

    def _use(self, memory, node, writes, name, position):
        for other, wrote, by in memory.uses:
            if (wrote or writes) and not self.graph.ordered(other, node):
                self.found.append(f"{self._id(position)} and {self._id(by)} use {name} at the same time")
        memory.uses.append((node, writes, position))

    def _drop(self, memory, name):
        if memory.names or memory.in_flight or memory.is_kept:
            return
        for owner in memory.owners:
            self.given_back[owner].append((name, [node for node, _, _ in memory.uses]))
        for key in [key for key, held in self.held.items() if held is memory]:
            del self.held[key]

    def _at(self, name, at):
        return at if self.group.values[name].scope is Scope.MICRO else 0

    def _memory(self, name, at):
        values = self.group.values
        while values[name].shares is not None:
            name = values[name].shares
        key = name, self._at(name, at)
        if key not in self.held:
            kept = values[name].scope is Scope.KEPT
            self.held[key] = _Held(is_kept=kept, owners={"main"} if kept else set())
        return self.held[key]
