"""How the launchers of several machines meet; each is a thread here."""

import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from adloco.cli.rank_processes import Machines
from adloco.config.settings import RunSettings
from adloco.distributed.launch.rank_store import store_at
from adloco.elastic import machines
from adloco.elastic import secret as proofs
from adloco.elastic.connections import open_sockets
from adloco.elastic.machines import Rendezvous, on_machines
from adloco.errors import RankFailureError
from tests.elastic.threads import at_once

NIGHTLY = pytest.mark.nightly


def test_the_first_to_come_begin_and_a_later_one_joins(address: tuple[str, int]) -> None:
    """Machines of 2 and 3 ranks begin with five; one of 2 joins as the sixth and seventh."""
    places = at_once(lambda: on_machines(address, 2, 2, 60), lambda: on_machines(address, 2, 3, 60))
    first, second = sorted(places, key=lambda place: place.first)
    assert first.keeps_store and not second.keeps_store, "rank 0 is where the store is"
    assert (first.launcher, first.first, first.world) == (0, 0, 5)
    counts = {0: 2, 1: 3} if places[0].keeps_store else {0: 3, 1: 2}
    assert (second.launcher, second.first, second.world) == (1, counts[0], 5)
    later = on_machines(address, 2, 2, 60)
    assert (later.launcher, later.first, later.world) == (2, 5, 5)
    assert [place.next_process() for place in (second, first, later)] == [7, 8, 9]


COMES = """
import sys
from adloco.elastic.machines import on_machines
on_machines(("127.0.0.1", int(sys.argv[1])), 3, 1, 60)
"""


@pytest.mark.usefixtures("warm_python")
def test_one_that_is_started_again_while_it_waits_counts_once(
    address: tuple[str, int],
) -> None:
    """Else a run of three would begin with a machine that is gone, and wait for its ranks."""
    places: list[Rendezvous] = []

    def come() -> threading.Thread:
        comes = threading.Thread(target=lambda: places.append(on_machines(address, 3, 2, 60)))
        comes.start()
        return comes

    threads = [come()]
    while not listens(address):
        pass
    store = store_at(*address)
    with subprocess.Popen([sys.executable, "-c", COMES, str(address[1])]) as gone:
        while not store.check(["count-1"]):
            assert gone.poll() is None
        gone.kill()
    time.sleep(2)  # A launcher takes longer to start.
    threads.append(come())
    time.sleep(2)
    assert not places, "two of three are here"
    threads.append(come())
    for thread in threads:
        thread.join(60)
    places.sort(key=lambda place: place.first)
    assert [(place.machine, place.first, place.world) for place in places] == [
        (0, 0, 6),
        (1, 2, 6),
        (2, 4, 6),
    ]
    assert [place.launcher for place in places] == [0, 2, 3]
    assert [place.next_process() for place in places] == [6, 7, 8]


def test_a_store_that_closes_is_left_to_those_who_used_it(address: tuple[str, int]) -> None:
    """The launchers of an ended run meet again at another store."""
    first, second = sorted(
        at_once(*[lambda: on_machines(address, 2, 1, 60)] * 2), key=lambda place: place.first
    )
    ends = threading.Thread(target=first.end)
    ends.start()
    second.wait_for_end()
    again: list[Rendezvous] = []
    comes = threading.Thread(target=lambda: again.append(on_machines(address, 2, 1, 60)))
    comes.start()
    second.end()
    ends.join(60)
    assert not again
    del first, second
    again.append(on_machines(address, 2, 1, 60))
    comes.join(60)
    assert sorted(place.first for place in again) == [0, 1]


def test_those_who_do_not_come_are_waited_for_no_longer_than_said(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        RankFailureError, match=r"1 of 3 machines have come within 0.5 s.* nothing is left to do"
    ):
        on_machines(address, 3, 1, 0.5)
    monkeypatch.setattr(machines, "CONNECT_SECONDS", 0.2)
    # TEST-NET-1 of RFC 5737: nobody has that address.
    with pytest.raises(RankFailureError, match=r"nobody has answered at 192\.0\.2\.1:29400"):
        on_machines(("192.0.2.1", 29400), 2, 1, 0.5)
    with pytest.raises(ValueError, match=r"no\.invalid:29400 cannot be used to meet"):
        on_machines(("no.invalid", 29400), 2, 1, 0.5)


ASKS = """
import sys
from adloco.elastic import machines, secret
machines.CONNECT_SECONDS = secret.PROOF_SECONDS = 0.2
machines.on_machines(("127.0.0.1", int(sys.argv[1])), 2, 1, 0.5, sys.argv[2].encode())
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("secret", ["", pytest.param("sixteen bytes ok", marks=NIGHTLY)])
def test_who_says_nothing_is_waited_for_no_longer_either(
    secret: str, address: tuple[str, int]
) -> None:
    """Another service, or a launcher that is stopped; torch's own wait for it has no end."""
    with socket.create_server(address):
        line = [sys.executable, "-c", ASKS, str(address[1]), secret]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert "RankFailureError: nobody has answered at 127.0.0.1" in ended.stderr


GIVES_UP = """
import sys
from adloco.elastic.machines import on_machines
on_machines(("127.0.0.1", int(sys.argv[1])), 3, 1, 4.0, sys.argv[2].encode())
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("secret", ["", pytest.param("sixteen bytes ok", marks=NIGHTLY)])
def test_a_launcher_waits_no_longer_than_the_one_with_the_store(
    secret: str, address: tuple[str, int]
) -> None:
    """Schedulers start it again after this error, and not after a traceback or bad input."""
    line = [sys.executable, "-c", GIVES_UP, str(address[1]), secret]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as first:
        while not listens(address):
            assert first.poll() is None
        with pytest.raises(RankFailureError) as error:
            on_machines(address, 3, 1, 60, secret.encode())
    assert str(error.value) == (
        "the launcher at {}:{} has ended before all machines were there; start the command again "
        "on that machine, and on this one".format(*address)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no such time limit")
def test_a_launcher_gives_up_a_store_that_does_not_answer(address: tuple[str, int]) -> None:
    """After silent_seconds, as its ranks do. TCP by itself asked again 42 s after a cut of 60 s."""
    host, port = address
    launcher, settings = Machines(host=host, port=port, number=2), RunSettings(silent_seconds=7)
    before = {*open_sockets()}
    places = at_once(*[lambda: launcher.rendezvous(1, settings, b"")] * 2)
    limits, served = [], 0
    for inode, number in open_sockets().items():
        if inode in before:
            continue
        with socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as found:
            # Both ends are in this process: those of the store itself have its port.
            if found.getsockname()[1] == port:
                served += 1
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            else:
                limits.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert served >= 2
    assert limits == [7000, 7000], "a connection of each launcher"
    del places


SECRET, ANOTHER = b"sixteen bytes ok", b"another sixteen bytes"


def test_machines_with_a_secret(address: tuple[str, int]) -> None:
    """The first one waits for the second; those without its secret come in between."""
    arrived: list[Rendezvous] = []

    def first() -> None:
        arrived.append(on_machines(address, 2, 1, 60, SECRET))

    def others() -> list[Any]:
        strangers = [lambda: on_machines(address, 2, 1, 60, ANOTHER)]
        strangers += [lambda: on_machines(address, 2, 1, 60)]
        return [*at_once(*strangers), on_machines(address, 2, 1, 60, SECRET)]

    waits = threading.Thread(target=first)
    waits.start()
    while not listens(address):
        pass
    another, without, second = others()
    waits.join(60)
    where = "the machine at {}:{} ".format(*address)
    assert str(another).startswith(f"{where}has another secret than this one; give all machines")
    assert str(without).startswith(f"{where}asks for the secret of the run; give this one the")
    assert isinstance(another, ValueError) and isinstance(without, ValueError)
    (place,) = arrived
    assert [place.first, second.first, place.world, second.world] == [0, 1, 2, 2]
    second.store.set("key", "through the door")
    assert place.store.get("key") == b"through the door"
    assert address[1] not in (place.store.port, second.store.port)
    at_once(place.end, second.end)
    assert not listens(address)


def test_a_secret_at_a_machine_without_one(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "PROOF_SECONDS", 0.2)
    places = at_once(*[lambda: on_machines(address, 2, 1, 60)] * 2)
    assert all(place.relay is None for place in places)
    with pytest.raises(ValueError, match="asks for no secret, and this one has run.secret_file"):
        on_machines(address, 2, 1, 60, SECRET)


def listens(address: tuple[str, int]) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(address) == 0
