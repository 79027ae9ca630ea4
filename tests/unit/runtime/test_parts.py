"""Small parts: counts, stop strings, loading, the cache."""

import json

import pytest
import torch

from specdec_runtime import Request, Stats
from specdec_runtime.cache import SlotCache
from specdec_runtime.detokenize import StopStringFinder
from specdec_runtime.loading import load_draft, read_vocab_shortlist
from specdec_runtime.scheduler import Row, Scheduler


def test_stats_definitions():
    """sglang 11572, vllm 56101: accepted leaves the bonus out, so no rate is above 1."""
    stats = Stats(num_prefills=1, num_committed=1 + 3 + 1 + 3)
    for num_accepted in (2, 0, 2):
        stats.add_round(num_proposed=2, num_accepted=num_accepted)
    assert stats.draft_acceptance_rate == 4 / 6
    assert stats.block_efficiency == 8 / 4
    assert stats.accepted_per_position == [2, 2]
    assert stats.proposed_per_position == [3, 3]
    assert stats.num_rounds_by_accepted == [1, 0, 2]
    assert stats.conditional_acceptance == [2 / 3, 1.0]
    total = Stats()
    total.add(stats)
    total.add(stats)
    assert total.accepted_per_position == [4, 4]
    assert total.num_rounds == 6


def row(request: Request, stop_ids=(2,)) -> Row:
    return Row(index=0, request=request, seed=0, stop_ids=frozenset(stop_ids), finder=None)


def test_tokens_behind_eos_are_not_counted():
    """vllm 56101: 5 proposed, 4 accepted, EOS is the second: 2 proposed and 2 accepted count."""
    one = row(Request([9], 20))
    one.rounds.append((0, 5, 4))
    assert one.commit([7, 2, 8, 8, 5], [], 0.0) == [7, 2]
    stats = one.output(detokenize=None, lossless=True).stats
    assert (stats.num_proposed, stats.num_accepted, stats.num_committed) == (2, 2, 2)


def test_finished_rows_leave_and_the_others_close_up():
    rows = [row(Request([9], 5)) for _ in range(5)]
    scheduler = Scheduler(rows, num_slots=4)
    assert len(scheduler.admit()) == 4
    for i in (0, 3):
        rows[i].finish_reason = "stop"
    for each in rows:
        each.hidden_H = torch.zeros(4)
    finished, moves = scheduler.retire()
    assert [any(f is rows[i] for f in finished) for i in range(5)] == [True, False, False, True, False]
    assert moves[-1] == (2, 0)
    assert [r.hidden_H is None for r in rows] == [True, False, False, True, False]  # of which a GPU has no more than of slots
    assert [r is x for r, x in zip(scheduler.active, (rows[2], rows[1]), strict=True)] == [True, True]
    assert [r is rows[4] for r in scheduler.admit()] == [True]


PIECES = {1: "Hello", 2: " wor", 3: "ld\n", 4: "\nUs", 5: "er:", 6: "�"}


def finder(*stop: str) -> StopStringFinder:
    return StopStringFinder(lambda ids: "".join(PIECES[i] for i in ids), stop)


def test_stop_string_over_several_tokens():
    """vllm 47616: the token that holds the beginning of the stop string goes with it; the text is cut exactly."""
    search = finder("\n\nUser:", "never")
    assert search.add([1, 2]) is None
    assert search.num_safe_tokens() == 2
    assert search.add([3]) is None
    assert search.num_safe_tokens() == 2  # "\n" may be the beginning of it
    assert search.add([4]) is None
    assert search.add([5]) == 2
    assert search.text == "Hello world"


def test_unfinished_characters_wait():
    search = finder("x")
    search.add([1, 6])
    assert search.text == "Hello"


def test_a_token_ends_with_the_character_of_which_it_holds_a_part():
    """The letters before it are found at once; it is safe, and lies before a string, only when its character does."""
    search = StopStringFinder(lambda ids: b"".join(BYTES[i] for i in ids).decode("utf-8", errors="replace"), ["x", "b"])
    assert search.add([1, 2]) is None  # "a", and the first byte of a euro sign behind "c"
    assert (search.text, search.num_safe_tokens()) == ("ac", 1)
    assert search.add([3]) is None
    assert (search.text, search.num_safe_tokens()) == ("ac", 1)
    assert search.add([4]) is None
    assert (search.text, search.num_safe_tokens()) == ("ac\N{EURO SIGN}", 4)
    assert search.add([5, 1]) == 4
    assert (search.text, search.has_found) == ("ac\N{EURO SIGN}", True)


BYTES = {1: b"a", 2: b"c\xe2", 3: b"\x82", 4: b"\xac", 5: b"b\xe2"}


def test_slot_cache_writes_and_rolls_back_by_position():
    cache = SlotCache(1, num_slots=3, capacity=8)

    def write(starts, values):
        states = torch.tensor(values, dtype=torch.float32)[:, None, :, None]  # [B, 1, L, 1]
        positions = torch.tensor(starts)[:, None] + torch.arange(states.shape[2])
        cache.begin(positions_BL=positions, first_slot=1, num_cached=5)
        keys, _ = cache.update(states, states, 0)
        return keys[:, 0, :, 0].tolist()

    assert write([0, 2], [[1, 2], [3, 4]]) == [[1, 2, 0, 0, 0], [0, 0, 3, 4, 0]]
    assert write([1, 3], [[7, 8], [9, 9]]) == [[1, 7, 8, 0, 0], [0, 0, 3, 9, 9]]
    cache.move_slot(2, 0, 5)
    cache.begin(positions_BL=torch.tensor([[7]]), first_slot=0, num_cached=5)
    keys, _ = cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 0, 3, 9, 9]


def test_load_draft_reads_the_shortlist(tmp_path, random_draft):
    random_draft.save_pretrained(tmp_path)
    model, ids = load_draft(tmp_path, "float32")
    assert ids is None
    assert model.dtype == torch.float32
    (tmp_path / "draftsmith.json").write_text(json.dumps({"vocab_shortlist": [7, 3, 9]}))
    assert load_draft(tmp_path, torch.bfloat16)[1].tolist() == [3, 7, 9]
    (tmp_path / "draftsmith.json").write_text(json.dumps({"vocab_shortlist": "all"}))
    with pytest.raises(ValueError, match="vocab_shortlist"):
        read_vocab_shortlist(tmp_path)
    with pytest.raises(ValueError, match="bfloat17"):
        load_draft(tmp_path, "bfloat17")
