"""The public names for type checkers and editors; tests/test_public_names.py keeps them equal to __init__.py's."""

from roundelay.cluster.elastic_world import (
    Rendezvous as Rendezvous,
    join as join,
)
from roundelay.cluster.environment import (
    World as World,
    init as init,
)
from roundelay.cluster.ticket import (
    Ticket as Ticket,
)
from roundelay.errors import (
    PeerLostError as PeerLostError,
    RoundelayError as RoundelayError,
    StrategyError as StrategyError,
    TopologyError as TopologyError,
)
from roundelay.learner import (
    Learner as Learner,
)
from roundelay.sampler import (
    ElasticSampler as ElasticSampler,
)
from roundelay.strategies import (
    ADPSGD as ADPSGD,
    DPSGD as DPSGD,
    Allreduce as Allreduce,
    DelayByOne as DelayByOne,
    LocalSGD as LocalSGD,
    Strategy as Strategy,
    SuperLearner as SuperLearner,
)
from roundelay.topology import (
    Mixing as Mixing,
    base_graph as base_graph,
    complete as complete,
    exponential as exponential,
    from_graph as from_graph,
    from_matrix as from_matrix,
    hypercube as hypercube,
    odd_even_ring as odd_even_ring,
    one_peer_exponential as one_peer_exponential,
    random_matching as random_matching,
    random_ring as random_ring,
    ring as ring,
    spectral_gap as spectral_gap,
    spectrum as spectrum,
    star as star,
    torus as torus,
)
from roundelay.training.task import (
    Task as Task,
    TaskConfig as TaskConfig,
)
from roundelay.weights import (
    whole_state as whole_state,
)

__version__: str
__all__: list[str]
