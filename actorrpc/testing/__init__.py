"""Worlds within one process, for tests: a simulated network, a virtual clock, and an order that a seed decides.

```python
with SimWorld(size=2, seed=7) as world:
    def program():
        return rpc.rpc_sync(1, operator.add, args=(1, 2))
    assert world.run(program) == [3]
```

Everything above the transport and the clock is the real thing. A world whose seed shows a fault shows it again.
"""

from actorrpc.testing.simulation import Simulation, SimulationError
from actorrpc.testing.world import SimWorld

__all__ = ["SimWorld", "Simulation", "SimulationError"]
