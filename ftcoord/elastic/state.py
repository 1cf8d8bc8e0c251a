"""What an elastic run trains: the state that its members share, and the samples that each of them takes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ftcoord.core.elastic import TORN, share, weight
from ftcoord.elastic.group import Group, current
from ftcoord.errors import ConfigError

T = TypeVar("T")

CHUNK: Final = 1 << 24
"""Bytes of tensors that are sent at once; a larger tensor is sent alone."""
_SHARDED: Final = ("FullyShardedDataParallel", "FSDPModule", "ZeroRedundancyOptimizer", "DTensor", "ShardedTensor")
"""Classes of which each rank has a part: nobody else has the part of a lost one."""
_WRAPPED: Final = ("DistributedDataParallel", "DataParallel")


class Sampler:
    """The order of the samples of an elastic run, and this rank's part of it.

    The global batch of a step is the next `batch_size` positions of the epoch's order, in any world; `State.commit()`
    counts it. So each sample is used by exactly one committed step of each epoch, whatever is lost or joins. The last
    batch of an epoch may be smaller.

        while sampler.epoch < 10:
            for indices in sampler.batches():
                loss = criterion(ddp(inputs[indices]), targets[indices]) * sampler.weight

    It may be a DataLoader's `batch_sampler`, whose iterator is then as far ahead of `commit()` as the loader reads.

    Args:
        length: the number of samples, or the data set.
        batch_size: the number of samples of a step, of all ranks together.
        shuffle: whether each epoch has an order of its own; else it is 0, 1, 2, ...
        seed: of the orders; the same on all ranks.

    Raises ConfigError.
    """

    def __init__(self, length: int | Sequence[Any], batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.length = length if isinstance(length, int) else len(length)
        if self.length < 1:
            raise ConfigError("length", self.length, "there must be a sample")
        if batch_size < 1:
            raise ConfigError("batch_size", batch_size, "give the number of samples of a step, of all ranks together")
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.epoch, self.position = 0, 0
        self.rank, self.world = 0, 1
        """Its place, which `elastic.run` sets."""

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches()

    def __len__(self) -> int:
        """How many batches the epoch still has."""
        return -(-(self.length - self.position) // self.batch_size)

    def batches(self) -> Iterator[list[int]]:
        """This rank's indices of each batch, from the first that is not committed to the end of the epoch. A rank gets
        one at least: without a part of a batch, a sample of it that counts nothing, since `weight` is 0 then."""
        order = self._order()
        for start in range(self.position, self.length, self.batch_size):
            stop = min(start + self.batch_size, self.length)
            first, last = share(start, stop, self.rank, self.world)
            yield order[first:last] or order[start : start + 1]

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss of the batch with that the next `commit()` counts: the gradients' mean
        over all ranks is then that over all samples. 1.0 if all parts are equal."""
        stop = min(self.position + self.batch_size, self.length)
        return weight(self.position, stop, self.rank, self.world)

    def advance(self) -> None:
        """Count a batch. `State.commit()` calls this."""
        self.position += self.batch_size
        if self.position >= self.length:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where it is; for a checkpoint, too."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class State:
    """What all members of an elastic run have alike. What it is given, it has as attributes.

        state = State(model=model, optimizer=optimizer, sampler=sampler, best=inf)
        state.best = min(state.best, loss)

    Whoever has committed the same step has the same state, so no copy is kept. Whoever is behind, or new, takes that of
    rank 0, and needs the host memory of one more state meanwhile. When a group is over in the middle of a step, plain
    values and the model's buffers are again as they were at the last commit; parameters are, since no optimizer has
    stepped. Random number generators are not part of it.

    Args:
        step: the number of committed steps, as from a checkpoint.
        parts: what has `state_dict` and `load_state_dict` (a model, not wrapped; optimizers, schedulers, scalers, a
            `Sampler`); all else are plain values: numbers, texts, tensors, and lists, tuples and dicts of these.

    Raises ConfigError for what cannot be sent, and for sharded parts, of which nobody else has a copy.
    """

    def __init__(self, *, step: int = 0, **parts: Any) -> None:
        own = self.__dict__
        own["step"] = step
        own["_parts"] = {name: one for name, one in parts.items() if hasattr(one, "load_state_dict")}
        own["_values"] = {name: one for name, one in parts.items() if name not in self._parts}
        for name, one in self._parts.items():
            _check_part(name, one)
        _check_values(self._values)
        own["_models"] = [one for one in self._parts.values() if isinstance(one, nn.Module)]
        own["_optimizers"] = [one for one in self._parts.values() if isinstance(one, Optimizer)]
        own["_samplers"] = [one for one in self._parts.values() if isinstance(one, Sampler)]
        own["_stepped"] = [0] * len(self._optimizers)  # how often each has stepped since the last commit
        for place, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda *_, place=place: self._note_step(place))
        own["_is_right"] = True
        own["_group"] = None  # the last whose state this is
        own["_committed"] = ({}, [])
        self._keep()

    def __getattr__(self, name: str) -> Any:
        for found in (self.__dict__.get("_parts", {}), self.__dict__.get("_values", {})):
            if name in found:
                return found[name]
        raise AttributeError(f"the state has no {name!r}: give it to State(...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        elif name in self._values:
            self._values[name] = value
        else:
            raise AttributeError(f"{name!r} is no plain value of this state: give it to State(...)")

    def commit(self) -> None:
        """The step counts, and its batch. The only point at which others join.

        Raises MembersChanged if others wait, or the group is over; the step counts nevertheless.
        """
        group = current()
        self.step += 1
        for sampler in self._samplers:
            sampler.advance()
        self._keep()
        group.let_in()
        group.check()

    # -- for elastic.run ------------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """See `core.elastic`."""
        if not self._is_right or set(self._stepped) - {0, 1} or len(set(self._stepped)) > 1:
            return TORN
        return 2 * self.step + any(self._stepped)

    @property
    def place(self) -> tuple[int, int]:
        """The number of the last group whose state this is, and the rank there."""
        return (self._group.number, self._group.rank) if self._group is not None and self._is_right else (0, 0)

    def take_place(self, group: Group) -> None:
        """Take rank 0's state, if anybody needs it, and the rank's samples. Raises MembersChanged."""
        arrangement = group.arrangement
        if not arrangement.is_even:
            self._exchange(group, takes=group.rank not in arrangement.right)
        self.step = arrangement.step
        if arrangement.places[0].progress % 2:
            for sampler in self._samplers:
                sampler.advance()
        self._group, self._is_right = group, True
        for sampler in self._samplers:
            sampler.rank, sampler.world = group.rank, group.world
        self._keep()

    def give_up_step(self) -> None:
        """The step that was begun will not be committed: undo what it has changed, unless its optimizers have
        stepped."""
        for one in (*self._models, *self._optimizers):
            one.zero_grad(set_to_none=True)
        if not any(self._stepped):
            values, buffers = self._committed
            self._values.update(values)
            for kept, buffer in zip(buffers, self._buffers(), strict=True):
                buffer.copy_(kept)

    # -- how ------------------------------------------------------------------------------------------------------

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for model in self._models for buffer in model.buffers()]

    def _keep(self) -> None:
        """What a step changes before its optimizers step, and is small: it is as now at the last commit."""
        self._committed = dict(self._values), [buffer.detach().clone() for buffer in self._buffers()]
        self._stepped[:] = [0] * len(self._stepped)

    def _note_step(self, place: int) -> None:
        self._stepped[place] += 1

    def _before_step(self, *_: object) -> None:
        """On a GPU, gradients are reduced by now only if its stream is done: stepping with others would be for good."""
        if self._group is not None:
            self._group.settle_device()

    def _exchange(self, group: Group, takes: bool) -> None:
        """Rank 0 sends its state, and whoever `takes` it loads it once all is there: a state that is only half there
        would be lost to all, if rank 0 is."""
        tensors: list[torch.Tensor] = []
        header = b""
        if group.rank == 0:
            parts = {name: one.state_dict() for name, one in self._parts.items()}
            header = _packed(_hollowed({"parts": parts, "values": self._values}, tensors))
        size = int(group.broadcast(torch.tensor([len(header)], device=group.device)))
        form = torch.frombuffer(bytearray(header or size), dtype=torch.uint8)
        sent = group.broadcast(form.to(group.device))
        if group.rank == 0:
            for chunk in _chunks(tensors):
                group.broadcast(torch.cat([_bytes_of(one).to(group.device) for one in chunk]))
            return
        hollow = _unpacked(bytes(sent.cpu().numpy().tobytes()))
        _hollowed(hollow, tensors)
        received: list[torch.Tensor] = []
        for chunk in _chunks(tensors):
            counts = [one.numel() * one.element_size() for one in chunk]
            got = group.broadcast(torch.empty(sum(counts), dtype=torch.uint8, device=group.device))
            if takes:
                pieces = torch.split(got.cpu(), counts)
                received += [_tensor_of(piece, one) for piece, one in zip(pieces, chunk, strict=True)]
        if takes:
            self._is_right = False  # until all is loaded
            whole = _filled(hollow, iter(received))
            for name, one in self._parts.items():
                one.load_state_dict(whole["parts"][name])
            self._values.update(whole["values"])


def _check_part(name: str, part: Any) -> None:
    found = {one.__name__ for one in type(part).__mro__}
    if isinstance(part, nn.Module):
        found |= {kind.__name__ for module in part.modules() for kind in type(module).__mro__}
        found |= {kind.__name__ for tensor in part.parameters() for kind in type(tensor).__mro__}
    if sharded := sorted(found & {*_SHARDED}):
        raise ConfigError(name, sharded[0], "give what each rank has all of: nobody has a copy of a lost rank's shard")
    if isinstance(part, nn.Module) and type(part).__name__ in _WRAPPED:
        raise ConfigError(name, type(part).__name__, "give the model itself, and wrap it by elastic.data_parallel")


def _check_values(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            _unpacked(_packed(_hollowed(value, [])))
        except Exception as error:  # torch raises UnpicklingError, AttributeError, TypeError and others
            raise ConfigError(
                name, type(value).__name__, f"give it state_dict() and load_state_dict(), or plain values: {error}"
            ) from None


# -- states as tensors and a form -------------------------------------------------------------------------------------


def _packed(form: Any) -> bytes:
    file = io.BytesIO()
    torch.save(form, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _hollowed(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A state with tensors that have no data, and the `tensors` in their order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return torch.empty_like(value, device="meta", requires_grad=False)
    if isinstance(value, Mapping):
        return {key: _hollowed(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_hollowed(one, tensors) for one in value)
    return value


def _filled(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The opposite of `_hollowed`."""
    if isinstance(form, torch.Tensor):
        return next(tensors)
    if isinstance(form, dict):
        return {key: _filled(one, tensors) for key, one in form.items()}
    if isinstance(form, (list, tuple)):
        return type(form)(_filled(one, tensors) for one in form)
    return form


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    size = 0
    for one in tensors:
        count = one.numel() * one.element_size()
        if chunk and size + count > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(one)
        size += count
    if chunk:
        yield chunk


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensor_of(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return data.clone().view(like.dtype).reshape(like.shape)
