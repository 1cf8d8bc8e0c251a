"""Training that is never stopped: the processes that are left form a new group, and go on. See docs/elastic.md.

    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler)

    @elastic.run(min_size=2)
    def train(state):
        ddp = elastic.data_parallel(state.model)
        for indices in state.sampler.batches():
            loss = criterion(ddp(inputs[indices]), targets[indices]) * state.sampler.weight
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.commit()

    train(state)

- `run`: decorates the function that trains.
- `State`: what all members have alike; `commit()` counts a step.
- `Sampler`: which samples a step uses, and which of them this rank.
- `data_parallel`: torch's DDP, whose waits end when a member is lost.
- `wait`: the same for a collective of one's own.
- `on_change`: registers what is called for each new group.
- `MembersChanged`, `TooFewMembers`: what these raise.
"""

from ftcoord.elastic.group import MembersChanged
from ftcoord.elastic.members import TooFewMembers
from ftcoord.elastic.state import Sampler, State
from ftcoord.elastic.training import data_parallel, on_change, run, wait

__all__ = ["MembersChanged", "Sampler", "State", "TooFewMembers", "data_parallel", "on_change", "run", "wait"]
