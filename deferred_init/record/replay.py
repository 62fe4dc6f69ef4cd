"""Run the nodes of a recording on real tensors: the values that eager would have.

See `deferred_init.record` for the description of the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.events import GeneratorEvent
from deferred_init.record.execution import Environment, Executor, Promise
from deferred_init.record.foreign import state_elsewhere, value_elsewhere
from deferred_init.record.generators import Generators
from deferred_init.record.graph import Recording
from deferred_init.record.needs import Needs, all_needs, needs_of
from deferred_init.record.nodes import Mark, Node, Stream, Value
from deferred_init.record.paused import index_of, plain_torch
from deferred_init.record.rewinds import Rewinds
from deferred_init.record.scratch import Scratch
from deferred_init.record.timeline import Timeline

__all__ = ["BeforeRandom", "Replay"]

OnReady = Callable[[Value, Tensor], None]
OnFilled = Callable[[Value, Callable[[Tensor, Any], None]], bool]
BeforeRandom = Callable[[Node], "int | Callable[..., Any] | None"]


class Replay:
    """Replays one recording on one device.

    Args:
        recording: What to replay.
        device: Stands for the device that the constructor believed to be on;
            by default that device itself.
        wanted: The values that `take` will be asked for; all nodes that none of
            them needs are skipped, except that their random numbers are drawn.
        before_random: Called before every random node; a seed that it returns is
            given to the node's generator, a function is called in place of the
            node's. Then nothing is drawn for nodes that are not needed, and `finish`
            puts the generators back as they were.
    """

    def __init__(
        self,
        recording: Recording,
        device: torch.device | str | None = None,
        *,
        wanted: Iterable[Value] = (),
        before_random: BeforeRandom | None = None,
    ) -> None:
        self.recording = recording
        target = recording.device if device is None else torch.device(device)
        if target.type == "cuda" and index_of(target) is None:
            target = torch.device("cuda", torch.cuda.current_device())
        self.device = target
        self.generators = Generators(recording, target)
        # Not a method: the real tensors in a cycle would wait for the collector.
        foreign = partial(value_elsewhere, Replay, target)
        self._executor = Executor(target, self.generators, foreign)
        self._before_random = before_random
        self._end = len(recording.nodes)
        self._wanted = set(wanted)
        self._plan: Needs | None = None
        self._needed: set[int] = set()
        self._env: Environment = {}
        self._scratch = Scratch()
        self._position = 0
        self._found: dict[torch.Generator, Tensor] | None = None
        self._rewinds: Rewinds  # made anew by each run from the start

    def run(
        self,
        upto: int | Mark | None = None,
        on_ready: OnReady | None = None,
        on_filled: OnFilled | None = None,
    ) -> None:
        """Run the nodes in recorded order, up to but without the one at `upto`.

        The default generators are live meanwhile and stay so between calls: what a
        caller draws after stopping at a mark comes at its place in eager's order.

        Args:
            upto: A node index, or a mark; by default all nodes are run.
            on_ready: Called with every wanted value and its tensor as soon as nothing
                later touches its storage; the replay then forgets it.
            on_filled: Called before, with what would write the value or a part of it
                (see `execution.Filling`), where it has no memory yet. If it returns
                True, it has done that, and `on_ready` is not called.

        Raises:
            ReplayError: If an operation fails; nothing is put back.
        """
        stop = self._end if upto is None else upto
        if isinstance(stop, Mark):
            stop = stop.index
        needs = self._begin()
        self._rewinds.take_back()
        with plain_torch(), torch.no_grad():
            for node in self.recording.nodes[self._position : stop]:
                self._step(node, needs)
                if on_ready is not None:
                    for value in needs.ready.get(node.index, ()):
                        if on_filled is None or not self._given(value, on_filled):
                            tensor = self._executor.fetch(value, self._env)
                            del self._env[value]
                            on_ready(value, tensor)
        self._position = max(self._position, stop)

    def _given(self, value: Value, on_filled: OnFilled) -> bool:
        """Let the caller write a value that has no memory yet; False if it has."""
        found = self._env.get(value)
        if not isinstance(found, Promise):
            return False
        given = on_filled(value, found.filling.write)
        if given:
            del self._env[value]
        return given

    def lend_states(self, mark: Mark) -> None:
        """Give the tracker of a mark's module its states there, until this goes on."""
        if self._before_random is None:
            self._rewinds.lend(mark)

    def settle_states(self) -> None:
        """Give the states that the constructor saved their values, after the run."""
        self._rewinds.take_back()
        self._rewinds.settle(drawn=self._before_random is None)

    def take(self, value: Value) -> Tensor:
        """Return the tensor of a wanted value that has been run, and let go of it.

        Raises:
            KeyError: If the value was not wanted, was taken before, or has not been
                computed yet.
        """
        tensor = self.get(value)
        del self._env[value]
        return tensor

    def get(self, value: Value) -> Tensor:
        """Return the tensor of a value that is at hand, and keep it."""
        with plain_torch(), torch.no_grad():
            return self._executor.fetch(value, self._env)

    @property
    def position(self) -> int:
        """Index of the next node that `run` will run."""
        return self._position

    def finish(self, *, keep_generators: bool | None = None) -> None:
        """End the replay and settle the generators.

        Args:
            keep_generators: Leave the default generators where the replay brought
                them, which is where eager construction would have. By default this
                is done for a generator that is where the recording left it, and one
                that was seeded or used since is put back as `run` found it.
        """
        if self._found is None:
            return
        self._rewinds.take_back()
        named = self._before_random is not None
        for generator, found in self._found.items():
            keep = keep_generators
            if keep is None:
                keep = not named and self.generators.untouched(generator, found)
            if not keep:
                generator.set_state(found)
        if keep_generators is not False:
            if not named:
                self.generators.settle_explicit()
            self.settle_states()
        self._found = None
        self._env.clear()
        self.free_scratch()

    def _begin(self) -> Needs:
        """Find what is needed and give every generator its starting state, once."""
        if self._plan is None:
            self._plan = all_needs(self.recording, self._wanted, self._end)
            self._needed = {node.index for node in self._plan.nodes}
        if self._found is not None:
            return self._plan
        resumed = partial(state_elsewhere, Replay)
        self._rewinds = Rewinds(self.recording, self.generators, resumed)
        starts = self.generators.defaults()
        self._found = self.generators.states()
        if self._before_random is None:
            for generator, start in starts.items():
                generator.set_state(start)
            for stream in self.recording.streams.values():
                if stream.generator is not None:
                    self.generators.of(stream).set_state(self.generators.start(stream))
        self._rewinds.passing(0, self._found)
        return self._plan

    def _step(self, node: Node, needs: Needs) -> None:
        """Run one node, draw its numbers only, or skip it."""
        index = node.index
        assert self._found is not None
        if node.stream is not None and self._before_random is not None:
            if index in self._needed:
                self._run_named(node, self._env, needs)
            return
        if index in self._needed:
            if node.stream is not None:
                self._scratch.free()  # not beside a tensor that may be as large
            self._executor.run(node, self._env, needs.last)
        elif node.stream is not None:
            self.draw_only(node)
        elif isinstance(node, GeneratorEvent) and self._before_random is None:
            self._rewinds.apply(node, self._found)
        self._rewinds.passing(index + 1, self._found)

    def _run_named(self, node: Node, env: Environment, needs: Needs) -> None:
        """Run a random node as the caller says."""
        assert self._before_random is not None
        assert node.stream is not None
        answer = self._before_random(node)
        if isinstance(answer, int):
            self.generators.of(node.stream).manual_seed(answer)
            answer = None
        self._executor.run(node, env, needs.last, answer)

    def value(self, value: Value, upto: int | None = None) -> Tensor:
        """Compute one value alone, whatever was computed before: the same bits.

        The generators are left as they were found.

        Args:
            value: Which one.
            upto: As it was before the node at this index; by default now.

        Raises:
            ReplayError: If an operation fails.
        """
        return self.values([value], upto)[0]

    def values(self, values: Sequence[Value], upto: int | None = None) -> list[Tensor]:
        """Compute several values together, so that shared storage stays shared."""
        end = len(self.recording.nodes) if upto is None else upto
        needs = needs_of(self.recording, set(values), end)
        env: Environment = {}
        found = self.generators.states()
        try:
            with plain_torch(), torch.no_grad():
                for node in needs.nodes:
                    if node.stream is None:
                        self._executor.run(node, env, needs.last)
                    elif self._before_random is not None:
                        self._run_named(node, env, needs)
                    else:
                        timeline = self._timeline(node.stream)
                        generator = self.generators.of(node.stream)
                        generator.set_state(timeline.before(node.index))
                        self._executor.run(node, env, needs.last)
                        timeline.after(node, generator)
                return [self._executor.fetch(value, env) for value in values]
        finally:
            for generator, state in found.items():
                generator.set_state(state)

    def execute(self, node: Node, env: Environment) -> None:
        """Run one node in an environment of the caller's, in the caller's grad mode."""
        self._executor.run(node, env)
        for value in node.outs:
            if value is not None:
                self._executor.fetch(value, env)

    def draw_only(self, node: Node) -> None:
        """Draw the random numbers of a node and throw them away."""
        scratch = node.overwrites
        reads = [v for v in dict.fromkeys(node.reads) if v is not scratch]
        env: Environment = {}
        if reads:
            inner = Replay(self.recording, self.device)
            env.update(zip(reads, inner.values(reads, node.index), strict=True))
        with plain_torch(), torch.no_grad():
            if scratch is not None:
                own = self._env.get(scratch)  # if at hand: it is overwritten later
                memory = own if isinstance(own, Tensor) else None
                env[scratch] = self._scratch.like(scratch, self.device, memory)
            self._executor.call(node, env)

    def free_scratch(self) -> None:
        """Let go of the buffer that numbers were drawn into for nobody."""
        self._scratch.free()

    def state_before(self, index: int, stream: Stream) -> Tensor:
        """Return the state of a stream's generator before the node at `index`."""
        found = self.generators.states()
        try:
            return self._timeline(stream).before(index)
        finally:
            for generator, state in found.items():
                generator.set_state(state)

    def _timeline(self, stream: Stream) -> Timeline:
        """Return the timeline of a stream's generator, shared between replays."""
        key = (self.device, stream.device, stream.generator and stream)
        timelines = self.recording.timelines
        if key not in timelines:
            timelines[key] = Timeline(Replay(self.recording, self.device), stream)
        timeline: Timeline = timelines[key]
        return timeline
