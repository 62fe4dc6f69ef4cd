"""Record any constructor and replay it: the bits of eager construction.

The caller's side: `deferred_init`, `is_deferred`, `materialize_tensor`,
`materialize_module`. What follows is for code that plans and executes a
materialization itself.

**Finding what was recorded.** A deferred tensor is a `DeferredTensor`, a subclass of
`torch.Tensor` that is a meta tensor to everybody (`is_meta`, `device`, a meta storage
of its own that views share). `value_of(tensor)` is its `Value`:

* `value.recording`: the `Recording` it belongs to (one per `deferred_init` call);
* `value.shape`, `.dtype`, `.stride`, `.meta` (a plain meta tensor: offset, layout);
* `value.device`: the device it was explicitly put on, `None` for the default one;
* `value.draws`: whether random numbers go into its storage;
* `value.storage`: equal (`is`) for values that share memory. Two tensor *objects*
  may have the same value (a Parameter and the tensor it was made of).

`final_class(tensor)` is the class it will have; `user_attributes(tensor)` the Python
attributes that a user put on it; `requires_grad` is the tensor's own.
`deferred_tensors(module)` yields the name and object of each deferred tensor once.

**Replaying in order.** ::

    replay = Replay(recording, "cuda", wanted=[value_of(p) for p in params])
    try:
        for mark in recording.marks:        # modules that initialize themselves
            replay.run(upto=mark)           # generators are now where eager's were
            initialize(mark.payload)        # draws from the default generators
        replay.run()
        tensors = {v: replay.take(v) for v in wanted}
    except BaseException:
        replay.finish(keep_generators=False)   # put the generators back
        raise
    replay.finish()                         # generators are where eager left them

`run(upto=index)` may stop anywhere. With `run(on_ready=f)`, `f(value, tensor)` is
called for each wanted value as soon as nothing later touches its storage, so that a
caller may keep a shard of the tensor and let go of it before the next one is made;
no `take` then. `take` gives the tensor and forgets it; aliases stay aliases, since
values of one storage are views of one real storage.
Intermediates are freed after their last use. Nodes that no wanted value needs are not
run, but their random numbers are drawn, so that the others keep theirs.

**In any other order.** `Replay(recording, device).value(v)` computes one value alone
and `.values([...])` some together: the same bits, whatever was computed before, and
the generators are left as found. See `timeline` for what that costs.

**By name.** `Replay(..., before_random=seed_of)` calls `seed_of(node)` before each
node that draws; the integer returned seeds its generator, a function returned is
called in place of the node's. `node.writes` (storages) and
`node.outs` (values) tell whom the numbers are for. Draws of nodes that are not
needed are then skipped.

**Putting it in place.** `become(tensor, real)` gives the deferred object the contents
of a real tensor and keeps identity, class, attributes, `requires_grad` and hooks; the
real tensor need not come from the replay. `realize(recording, values, device,
whole=...)` does replay and bookkeeping so that tensors made later over the same
storage share it.

**Order of initialization by others.** `external_classes()` in `external` decides which
classes are left to themselves inside a constructor; each leaves a `Mark` whose
`payload` is the module and whose `index` is its place in `recording.nodes`.
"""

from deferred_init.record import convert  # noqa: F401 - gives tensors `to` and copies
from deferred_init.record.construct import deferred_init, is_deferred, recording_of
from deferred_init.record.defer import defer
from deferred_init.record.early import early_value
from deferred_init.record.execution import Filling
from deferred_init.record.external import place_of
from deferred_init.record.grads import recompute
from deferred_init.record.graph import Recording
from deferred_init.record.handed import hand_out, handed_out
from deferred_init.record.last_uses import last_use
from deferred_init.record.materialize import (
    become,
    deferred_tensors,
    dressed,
    materialize_module,
    materialize_tensor,
    realize,
)
from deferred_init.record.nodes import Mark, Node, Storage, Value
from deferred_init.record.places import (
    attributes_in_place,
    move_places,
    value_in_place,
)
from deferred_init.record.problems import RecordError, ReplayError
from deferred_init.record.replay import BeforeRandom, Replay
from deferred_init.record.tensor import (
    DeferredTensor,
    final_class,
    user_attributes,
    value_of,
)

__all__ = [
    "BeforeRandom",
    "DeferredTensor",
    "Filling",
    "Mark",
    "Node",
    "RecordError",
    "Recording",
    "Replay",
    "ReplayError",
    "Storage",
    "Value",
    "attributes_in_place",
    "become",
    "defer",
    "deferred_init",
    "deferred_tensors",
    "dressed",
    "early_value",
    "final_class",
    "hand_out",
    "handed_out",
    "is_deferred",
    "last_use",
    "materialize_module",
    "materialize_tensor",
    "move_places",
    "place_of",
    "realize",
    "recompute",
    "recording_of",
    "user_attributes",
    "value_in_place",
    "value_of",
]
