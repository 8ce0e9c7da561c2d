"""Load by placed requests, driven beside a recount from scratch."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.kernel.values import RequestId, Target, WorkerId
from penstock.router.workers.active_sequences import ActiveSequences, TargetLoad
from tests.depth import deep
from tests.router.written_states import written

A, B = Target(WorkerId("a")), Target(WorkerId("b"))
CHAINS = [[1, 2, 3, 4], [1, 2, 7, 8, 9], [5, 6], [], [1], [1, 11]]
ORDERS = [[(A, 0), (B, 0)], [(B, 0), (A, 0)], [(B, 0)]]
"""Lists of targets, each with something behind it."""


def place(
    active: ActiveSequences, name: str, target: Target = A, blocks: list[int] | None = None, **more: object
) -> None:
    active.place(RequestId(name), target, prefill_tokens=10, blocks=blocks or [], unhashed_blocks=1, now=0, **more)  # type: ignore[arg-type]


def test_blocks_that_requests_share_count_once() -> None:
    active = ActiveSequences()
    place(active, "r", blocks=CHAINS[0])
    place(active, "s", blocks=CHAINS[1])
    assert active.load(A).blocks == len({*CHAINS[0], *CHAINS[1]}) + 2
    active.end(RequestId("r"))
    assert active.load(A).blocks == len(CHAINS[1]) + 1


def test_prefill_counts_until_the_first_token() -> None:
    active = ActiveSequences()
    place(active, "r")
    active.first_token(RequestId("r"), 5)
    active.first_token(RequestId("r"), 6)
    assert active.load(A).prefill_tokens == 0 and active.load(A).requests == 1


def test_silent_requests_of_other_routers_expire_and_own_ones_do_not() -> None:
    active = ActiveSequences()
    place(active, "mine")
    place(active, "theirs", router="other")
    place(active, "fresh", router="other")
    active.grown(RequestId("fresh"), 2, 100, "other")
    assert active.expire(50) == 1 and active.expired == 1
    assert active.load(A).requests == 2


def test_a_router_that_is_gone_takes_its_load_along() -> None:
    active = ActiveSequences()
    place(active, "r", router="other")
    place(active, "r")
    active.drop_router("other")
    assert active.load(A).requests == 1


def test_blocks_with_a_request_counts_only_what_is_new() -> None:
    active = ActiveSequences()
    place(active, "r", blocks=CHAINS[0])
    assert active.load(A).blocks_with(CHAINS[1], 1) == 4 + 1 + 3 + 1
    assert TargetLoad().blocks_with([], 2) == 2


def shares(active: ActiveSequences, chain: list[int], order: list[tuple[Target, int]]) -> list[int]:
    """Return what targets share with a chain, and see that each load says the same."""
    shared = active.shared(active.columns("any", order), chain)
    found = [0] * len(order) if isinstance(shared, int) else shared.tolist()
    assert found == [active.load(target).shared(chain) for target, _ in order]
    return found


def test_what_targets_share_follows_who_comes_and_goes() -> None:
    active, order = ActiveSequences(), ORDERS[0]
    assert shares(active, CHAINS[0], order) == [0, 0]
    place(active, "one", A, CHAINS[1])
    place(active, "two", B, CHAINS[4])
    assert shares(active, CHAINS[0], order) == [2, 1]
    active.end(RequestId("two"))
    assert shares(active, CHAINS[0], order) == [2, 0]
    place(active, "three", B, CHAINS[0])
    assert shares(active, CHAINS[0], order) == [2, 4] and shares(active, CHAINS[5], order) == [1, 1]


class Machine(RuleBasedStateMachine):
    """Random placements; `check` recounts every load from the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.active = ActiveSequences()
        self.now = 0

    names = st.sampled_from([RequestId(f"r{n}") for n in range(6)])
    routers = st.sampled_from(["", "p", "q"])

    @rule(name=names, where=st.sampled_from([A, B]), chain=st.sampled_from(CHAINS), router=routers)
    def place(self, name: RequestId, where: Target, chain: list[int], router: str) -> None:
        self.now += 1
        self.active.place(
            name, where, prefill_tokens=self.now, blocks=chain, unhashed_blocks=1, now=self.now, router=router
        )

    @rule(name=names, router=routers)
    def first(self, name: RequestId, router: str) -> None:
        self.active.first_token(name, self.now, router)

    @rule(name=names, router=routers, blocks=st.integers(0, 5))
    def grow(self, name: RequestId, router: str, blocks: int) -> None:
        self.active.grown(name, blocks, self.now, router)

    @rule(name=names, router=routers)
    def end(self, name: RequestId, router: str) -> None:
        self.active.end(name, router)

    @rule()
    def expire(self) -> None:
        self.active.expire(self.now - 3)

    @rule(chain=st.sampled_from(CHAINS), order=st.sampled_from(ORDERS))
    def share(self, chain: list[int], order: list[tuple[Target, int]]) -> None:
        shares(self.active, chain, order)

    @rule()
    def through_a_snapshot(self) -> None:
        other = ActiveSequences()
        other.restore(written(self.active))
        assert other.snapshot() == self.active.snapshot()
        self.active = other

    @invariant()
    def counts_are_right(self) -> None:
        self.active.check()
        for load in self.active.loads().values():
            assert load.requests > 0 and load.prefill_tokens >= 0 and load.unhashed_blocks >= 0


TestActive = Machine.TestCase
TestActive.settings = settings(max_examples=deep(60), stateful_step_count=40, deadline=None)
