"""Worlds within one process, and faults, for tests: a simulated network, a virtual clock, an order that a seed decides.

```python
with SimWorld(size=2, seed=7) as world:
    def program():
        return rpc.rpc_sync(1, operator.add, args=(1, 2))
    assert world.run(program) == [3]
```

`SimCluster` runs whole programs, which join and leave by themselves, and lets processes die and networks break.
`Faults` says what messages come to harm by, there and (`faulty`) in real processes. docs/testing.md tells more.

Everything above the transport and the clock is the real thing. A world whose seed shows a fault shows it again.
"""

from actorrpc.testing.cluster import SimCluster, SimProcess
from actorrpc.testing.faults import Faults, Passing, faulty
from actorrpc.testing.simulation import Simulation, SimulationError
from actorrpc.testing.world import SimWorld

__all__ = ["Faults", "Passing", "SimCluster", "SimProcess", "SimWorld", "Simulation", "SimulationError", "faulty"]
