"""A lease is judged by the reader's own clock."""

from penstock_kubernetes.store.kubernetes_leases import LONG_DEAD, LeaseRenewal, LeaseSightings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_lives_until_no_renewal_was_seen_for_its_ttl() -> None:
    clock = Clock()
    sightings = LeaseSightings(clock)
    assert sightings.see("a", LeaseRenewal("1", 10.0))
    clock.now += 9
    assert sightings.late() == []
    assert not sightings.see("a", LeaseRenewal("2", 10.0))
    clock.now += 9
    assert sightings.judge() == []
    clock.now += 2
    assert sightings.judge() == ["a"]
    assert not sightings.is_alive("a")
    assert sightings.see("a", LeaseRenewal("3", 10.0)), "its owner was only slow"
    assert sightings.is_alive("a")


def test_what_a_watch_tells_late_renews_nothing() -> None:
    clock = Clock()
    sightings = LeaseSightings(clock)
    sightings.look({"a": LeaseRenewal("9", 10.0)})
    clock.now += 11
    assert not sightings.see("a", LeaseRenewal("8", 10.0))
    assert sightings.judge() == ["a"]
    assert not sightings.see("a", LeaseRenewal("8", 10.0))
    assert not sightings.is_alive("a")


def test_after_an_outage_owners_have_their_whole_ttl_and_the_dead_stay_dead() -> None:
    clock = Clock()
    sightings = LeaseSightings(clock)
    sightings.look({"dead": LeaseRenewal("1", 1.0), "alive": LeaseRenewal("2", 10.0)})
    clock.now += 2
    sightings.judge()
    clock.now += 300
    sightings.forgive()
    sightings.look({"dead": LeaseRenewal("1", 1.0), "alive": LeaseRenewal("2", 10.0)})
    assert sightings.late() == []
    assert not sightings.is_alive("dead")
    assert sightings.is_alive("alive")


def test_a_lease_is_deleted_long_after_its_end() -> None:
    clock = Clock()
    sightings = LeaseSightings(clock)
    sightings.see("a", LeaseRenewal("1", 1.0))
    clock.now += 2
    sightings.judge()
    assert sightings.long_dead() == {}
    clock.now += LONG_DEAD + 2
    assert sightings.long_dead() == {"a": "1"}
    sightings.vanish("a")
    assert sightings.long_dead() == {}
