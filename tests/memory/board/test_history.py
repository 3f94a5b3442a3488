"""What a rank remembers of its calls, to be compared with ranks whose records come late."""

from __future__ import annotations

from overweave.memory.board.history import KEPT, History

HASH = -5  # of a signature: a signed word


def test_calls_are_found_until_as_many_others_were_made():
    history = History()
    digests = [history.add(call, b"of %d" % call, HASH) for call in range(1, KEPT + 2)]
    assert history.find(KEPT + 2) is None
    assert history.find(1) is None
    noted = history.find(2)
    assert noted is not None
    assert (noted.signature, noted.digest) == (b"of 2", digests[1])
    assert len({*digests}) == len(digests)
    assert all(0 <= digest < 1 << 63 for digest in digests)  # a signed word holds it


def test_a_call_that_differs_is_told_by_all_that_follow():
    ours, theirs = History(), History()
    for history, second in ((ours, HASH), (theirs, HASH + 1)):
        for call in range(1, 200):
            history.add(call, b"", second if call == 2 else HASH)
    seen = [[history.find(call) for call in range(1, 200)] for history in (ours, theirs)]
    assert [mine == other for mine, other in zip(*seen, strict=True)] == [True] + [False] * 198


def test_a_call_that_is_only_asked_for_leaves_no_trace():
    history = History()
    asked = history.digest_with(HASH)
    assert history.digest_with(HASH) == asked == history.add(1, b"", HASH)
    assert history.add(2, b"", HASH) != asked
    history.clear()
    assert history.find(2) is None
    assert history.add(1, b"", HASH) == asked
