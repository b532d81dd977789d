"""Scheduling over a real page pool, without a model: who runs, who owns pages, who waits."""

from __future__ import annotations

import random

import pytest

from astrai import PagePool
from astrai.engine.request import Request, SequenceState
from astrai.engine.scheduler import MAX_OVERTAKES, Scheduler
from astrai.sampling import SamplingParams


class Bytes:
    """A vocabulary of the 256 bytes."""

    def id_to_piece(self, token_id):
        return bytes([token_id % 256])


class Harness:
    """A scheduler with a pretended model: the token after `n` known tokens is `n % 50`."""

    def __init__(self, num_pages=64, page_size=4, max_batch=8, max_step_tokens=16):
        self.pool = PagePool(num_pages, page_size)
        # All prompts begin alike here; what a cached prefix does has tests of its own.
        self.scheduler = Scheduler(
            self.pool, max_batch=max_batch, max_step_tokens=max_step_tokens, prefix_caching=False
        )
        self.next_task = 0
        self.prefills = []
        self.decodes = []

    def add(self, request_id, prompt_len, max_tokens, n=1, priority=0):
        params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
        prompt = list(range(100, 100 + prompt_len))
        request = Request(
            request_id,
            None,
            prompt,
            params,
            seed=0,
            max_new_tokens=max_tokens,
            stop_ids=(),
            priority=priority,
        )
        request.make_sequences(self.next_task, Bytes(), ())
        self.next_task += n
        self.scheduler.add(request)
        return request

    def finish_batch(self, batch):
        self.scheduler.commit(batch)
        for place in batch.sampled:
            sequence = batch.sequences[place]
            if sequence.finish_reason is None:
                sequence.accept(sequence.num_tokens % 50, None, 0.0)
                if sequence.finish_reason is None:
                    self.scheduler.place(sequence)
                else:
                    self.scheduler.finish(sequence)

    def step(self):
        """One step, in the order in which the engine takes its halves."""
        batch = self.scheduler.schedule_decode()
        if batch is not None:
            self.check_batch(batch)
            assert set(batch.q_lens) == {1}
            self.decodes.append([s.order for s in batch.sequences])
            self.take_copies()
            self.finish_batch(batch)
        batch = self.scheduler.schedule_prefill()
        if batch is not None:
            self.check_batch(batch)
            rows = zip(batch.sequences, batch.q_lens, strict=True)
            self.prefills.append([(s.order, q) for s, q in rows])
            self.take_copies()
            self.finish_batch(batch)
        self.pool.check_integrity()

    def take_copies(self):
        """What binding a step does with queued copies; without pages there is nothing to copy."""
        self.pool.take_page_copies()

    def check_batch(self, batch):
        """A row's new tokens are exactly the known tokens that follow what is computed."""
        start = 0
        for sequence, q_len in zip(batch.sequences, batch.q_lens, strict=True):
            known = sequence.request.prompt_ids + sequence.output_ids
            first = self.pool.length(sequence.task_id)
            assert first == sequence.num_computed
            assert batch.input_ids[start : start + q_len] == known[first : first + q_len]
            pages = self.pool.pages(sequence.task_id)
            assert len(pages) * self.pool.page_size >= first + q_len
            start += q_len
        assert start == len(batch.input_ids)

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def assert_drained(self):
        assert self.pool.num_free_pages == self.pool.num_pages
        assert all(self.pool.ref_count(page) == 0 for page in range(self.pool.num_pages))
        assert not self.scheduler.has_work
        self.pool.check_integrity()


def expected_output(prompt_len, max_tokens):
    return [(prompt_len + i) % 50 for i in range(max_tokens)]


def test_prompts_share_the_token_budget_in_order_of_arrival():
    harness = Harness(max_step_tokens=8)
    harness.add(0, 10, 3)
    harness.add(1, 7, 3)
    harness.run()
    assert harness.prefills == [[((0, 0), 8)], [((0, 0), 2), ((1, 0), 6)], [((1, 0), 1)]]
    harness.assert_drained()


@pytest.mark.parametrize("budget", [1, 3, 4, 9, 10, 11])
def test_each_token_of_a_chunked_prompt_is_computed_once(budget):
    harness = Harness(max_step_tokens=budget)
    request = harness.add(0, 10, 5)
    harness.run()
    assert sum(q for rows in harness.prefills for _, q in rows) == 10
    assert request.sequences[0].output_ids == expected_output(10, 5)
    harness.assert_drained()


def test_decoding_goes_on_while_a_long_prompt_is_read():
    harness = Harness(max_step_tokens=4)
    harness.add(0, 3, 20)
    harness.step()
    harness.add(1, 32, 2)
    for _ in range(8):
        harness.step()
    assert harness.decodes[:8] == [[(0, 0)]] * 8
    harness.run()
    harness.assert_drained()


def test_batch_limit_is_kept_and_a_freed_place_is_taken():
    harness = Harness(max_batch=2)
    for i, length in enumerate((2, 9, 4)):
        harness.add(i, 4, length)
    harness.run()
    assert max(len(rows) for rows in harness.decodes) == 2
    assert harness.prefills[0] == [((0, 0), 4), ((1, 0), 4)]
    assert [order for rows in harness.prefills[1:] for order, _ in rows] == [(2, 0)]
    harness.assert_drained()


def test_newcomer_waits_until_its_prompt_and_a_page_for_each_other_are_free():
    harness = Harness(num_pages=6, page_size=4)
    harness.add(0, 8, 8)  # 2 pages, later 4
    harness.add(1, 12, 2)  # 3 pages; with one for the first it would need all 6
    harness.step()
    assert harness.scheduler.num_running == 2
    harness.run()
    harness.assert_drained()
    harness = Harness(num_pages=5, page_size=4)
    harness.add(0, 8, 8)
    harness.add(1, 12, 2)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 1)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.assert_drained()


def started(harness):
    """Requests in the order in which they first ran."""
    return list(dict.fromkeys(order[0] for rows in harness.prefills for order, _ in rows))


def test_small_prompts_start_while_a_large_one_does_not_fit():
    harness = Harness(num_pages=8, page_size=4)
    harness.add(0, 14, 8)  # 4 pages
    harness.add(1, 24, 2)  # 6 pages: waits for the first
    for i in range(2, 6):
        harness.add(i, 3, 2)
    harness.step()
    assert started(harness) == [0, 2]
    harness.run()
    assert started(harness) == [0, 2, 3, 4, 5, 1]
    harness.assert_drained()


def test_a_large_prompt_is_overtaken_so_often_and_no_more():
    harness = Harness(num_pages=8, page_size=4)
    harness.add(0, 12, 6)
    harness.add(1, 24, 2)
    for i in range(2, 3 * MAX_OVERTAKES):
        harness.add(i, 3, 1)  # a stream of small ones that could go on for ever
    for _ in range(4000):
        if not harness.scheduler.has_work:
            break
        if harness.scheduler.num_waiting < 20 and len(started(harness)) < MAX_OVERTAKES:
            harness.add(1000 + harness.next_task, 3, 1)
        harness.step()
    order = started(harness)
    assert order.index(1) <= MAX_OVERTAKES + 1
    assert order.index(1) > 3, "nobody overtook it: the test is void"
    harness.assert_drained()


def test_a_preempted_sequence_is_not_overtaken():
    harness = Harness(num_pages=6, page_size=4)
    harness.add(0, 8, 12)  # grows from 2 to 5 pages
    harness.add(1, 8, 12)
    for _ in range(200):
        harness.step()
        if harness.scheduler.num_preemptions:
            break
    harness.add(2, 2, 1)  # would fit beside the first
    before = len(harness.prefills)
    harness.run()
    later = [order[0] for rows in harness.prefills[before:] for order, _ in rows]
    assert later.index(1) < later.index(2)
    harness.assert_drained()


def test_the_lower_number_is_served_first():
    harness = Harness(max_batch=1)
    for i, priority in enumerate((5, 0, 5, -3, 0)):
        harness.add(i, 4, 2, priority=priority)
    harness.run()
    assert started(harness) == [3, 1, 4, 0, 2]
    assert harness.scheduler.num_preemptions == 0
    harness.assert_drained()


@pytest.mark.parametrize("limits", [{"max_batch": 2}, {"num_pages": 7}])
def test_a_running_sequence_gives_way_to_a_more_urgent_one(limits):
    harness = Harness(page_size=4, **limits)
    patient = [harness.add(i, 8, 6, priority=1) for i in range(2)]
    for _ in range(3):
        harness.step()
    urgent = harness.add(2, 8, 3, priority=0)
    harness.step()
    assert urgent.sequences[0].output_ids, "it did not start at once"
    harness.run()
    # The younger of the two gave way, the older one only if that was not enough.
    assert patient[1].metrics().preemptions >= 1
    assert patient[0].metrics().preemptions == 0
    for request in (*patient, urgent):
        expected = expected_output(8, request.max_new_tokens)
        assert request.sequences[0].output_ids == expected
    harness.assert_drained()


def test_nobody_gives_way_to_an_equal():
    harness = Harness(max_batch=2)
    for i in range(2):
        harness.add(i, 8, 6, priority=1)
    harness.step()
    harness.add(2, 8, 3, priority=1)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.assert_drained()


def test_an_urgent_prompt_is_not_held_up_by_a_long_one_that_is_being_read():
    harness = Harness(max_step_tokens=8)
    harness.add(0, 60, 2, priority=1)
    harness.step()
    urgent = harness.add(1, 4, 2, priority=0)
    harness.step()
    assert harness.prefills[-1] == [((1, 0), 4), ((0, 0), 4)]
    assert len(urgent.sequences[0].output_ids) == 1
    assert harness.scheduler.num_preemptions == 0
    harness.run()
    harness.assert_drained()


def test_nobody_gives_way_for_nothing_and_what_fits_runs():
    """The urgent request does not fit even if the patient one leaves: both go on meanwhile."""
    harness = Harness(num_pages=12, page_size=4)
    harness.add(0, 24, 12, priority=0)  # 6 pages, later 9
    patient = harness.add(1, 4, 8, priority=5)
    harness.step()
    harness.add(2, 30, 2, priority=0)  # 8 pages: not before the first has ended
    small = [harness.add(i, 3, 2, priority=1) for i in (3, 4)]
    for _ in range(6):
        harness.step()
    assert patient.metrics().preemptions == 0
    assert all(request.is_finished for request in small)
    harness.run()
    harness.assert_drained()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_samples_that_end_at_once_do_not_run_one_by_one(prefix_caching, max_tokens):
    harness = Harness(num_pages=1024, max_batch=64, max_step_tokens=4096)
    harness.scheduler.prefix_caching = prefix_caching
    request = harness.add(0, 22, max_tokens, n=64)
    steps = 0
    while harness.scheduler.has_work:
        harness.step()
        steps += 1
    assert steps <= max_tokens + 2
    assert [s.output_ids for s in request.sequences] == [expected_output(22, max_tokens)] * 64
    harness.assert_drained()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_everything_is_served_and_every_page_returned(seed):
    rng = random.Random(seed)
    harness = Harness(
        num_pages=rng.choice((6, 8, 20)),
        page_size=4,
        max_batch=rng.choice((1, 2, 5)),
        max_step_tokens=rng.choice((1, 3, 16)),
    )
    requests = []
    for i in range(30):
        length, new = rng.randint(1, 10), rng.randint(1, 12)
        n = rng.choice((1, 1, 1, 2, 3))
        requests.append(harness.add(i, length, new, n=n, priority=rng.choice((-1, 0, 0, 0, 2))))
        for _ in range(rng.choice((0, 0, 1, 4))):
            if harness.scheduler.has_work:
                harness.step()
    harness.run(limit=20000)
    for request in requests:
        expected = expected_output(len(request.prompt_ids), request.max_new_tokens)
        assert [s.output_ids for s in request.sequences] == [expected] * request.params.n
    harness.assert_drained()


def test_youngest_gives_way_and_starts_over_with_its_output():
    harness = Harness(num_pages=7, page_size=16, max_step_tokens=8)
    requests = [harness.add(i, length, 40) for i, length in enumerate((3, 3, 20, 37))]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert requests[0].metrics().preemptions == 0, "the oldest must never give way"
    for request in requests:
        assert request.sequences[0].output_ids == expected_output(len(request.prompt_ids), 40)
    harness.assert_drained()


def test_preempted_sequence_comes_back_before_younger_ones():
    harness = Harness(num_pages=4, page_size=4)
    for i in range(4):
        harness.add(i, 4, 8)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    started = list(dict.fromkeys(order for rows in harness.prefills for order, _ in rows))
    assert started == [(i, 0) for i in range(4)]
    harness.assert_drained()


def test_samples_share_the_pages_of_their_prompt():
    harness = Harness(num_pages=64, page_size=4, max_step_tokens=64)
    request = harness.add(0, 22, 6, n=4)
    harness.step()
    harness.step()
    assert harness.scheduler.num_running == 4
    # 5 whole prompt pages once; then each sample has its own copy of the page that the prompt
    # ends in and no more yet.
    assert harness.pool.num_pages - harness.pool.num_free_pages == 5 + 4
    leader = harness.pool.pages(request.sequences[0].task_id)
    assert [harness.pool.ref_count(page) for page in leader[:5]] == [4] * 5
    # The prompt is computed once; each further sample computes its last token again.
    assert sum(q for rows in harness.prefills for _, q in rows) == 22 + 3
    harness.run()
    assert [s.output_ids for s in request.sequences] == [expected_output(22, 6)] * 4
    harness.assert_drained()


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5])
def test_samples_of_short_prompts(prompt_len):
    harness = Harness(page_size=4)
    request = harness.add(0, prompt_len, 5, n=3)
    harness.run()
    assert [s.output_ids for s in request.sequences] == [expected_output(prompt_len, 5)] * 3
    harness.assert_drained()


def test_samples_in_a_pool_that_is_too_small_for_all():
    harness = Harness(num_pages=6, page_size=4, max_step_tokens=5)
    requests = [harness.add(0, 9, 10, n=3), harness.add(1, 5, 9, n=2)]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for request in requests:
        expected = expected_output(len(request.prompt_ids), request.max_new_tokens)
        assert [s.output_ids for s in request.sequences] == [expected] * request.params.n
    harness.assert_drained()


def test_abort_of_unknown_finished_or_aborted_requests_does_nothing():
    harness = Harness()
    harness.add(0, 3, 2)
    assert harness.scheduler.abort(7) is False
    assert harness.scheduler.abort(0) is True
    assert harness.scheduler.abort(0) is False
    harness.add(1, 3, 2)
    harness.run()
    assert harness.scheduler.abort(1) is False
    harness.assert_drained()


def test_abort_while_a_step_is_in_flight_keeps_the_pages_until_it_is_over():
    harness = Harness()
    request = harness.add(0, 6, 4)
    batch = harness.scheduler.schedule_prefill()
    held = harness.pool.num_free_pages
    assert harness.scheduler.abort(0) is True
    assert harness.scheduler.abort(0) is False
    assert harness.pool.num_free_pages == held
    assert request.sequences[0].state is SequenceState.PREFILLING
    harness.finish_batch(batch)
    assert request.sequences[0].finish_reason == "abort"
    assert request.sequences[0].output_ids == []
    harness.assert_drained()


def test_a_second_step_cannot_begin_in_flight():
    harness = Harness()
    harness.add(0, 6, 4)
    harness.scheduler.schedule_prefill()
    for schedule in (harness.scheduler.schedule_prefill, harness.scheduler.schedule_decode):
        with pytest.raises(RuntimeError, match="in flight"):
            schedule()


@pytest.mark.parametrize("committed", [False, True])
def test_failed_step_can_be_run_again(committed):
    harness = Harness(page_size=2)
    requests = [harness.add(0, 5, 6), harness.add(1, 3, 6, n=2)]
    for number in range(30):
        if not harness.scheduler.has_work:
            break
        schedule = (
            harness.scheduler.schedule_decode
            if number % 3 == 0
            else harness.scheduler.schedule_prefill
        )
        batch = schedule()
        if batch is not None:
            if committed:
                harness.scheduler.commit(batch)
            harness.scheduler.rollback()
        harness.step()
    for request in requests:
        expected = expected_output(len(request.prompt_ids), 6)
        assert [s.output_ids for s in request.sequences] == [expected] * request.params.n
    harness.assert_drained()


def test_request_that_can_never_fit_is_a_broken_promise():
    harness = Harness(num_pages=2, page_size=4)
    harness.add(0, 9, 1)
    with pytest.raises(RuntimeError, match=r"request 0 needs 3 pages, 2 of 2 are free"):
        harness.step()


@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_aborts_at_random_moments_return_every_page_once(first_seed):
    """Between steps, in flight, twice, while queued, of unknown ids: 1000 runs in all."""
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        harness = Harness(num_pages=12, page_size=4, max_batch=4, max_step_tokens=7)
        requests = [
            harness.add(i, rng.randint(1, 20), rng.randint(1, 9), n=rng.choice([1, 1, 2, 3]))
            for i in range(6)
        ]
        aborted = set()

        def maybe_abort(rng=rng, harness=harness, aborted=aborted):
            if rng.random() < 0.3:
                victim = rng.randint(0, 7)
                if harness.scheduler.abort(victim):
                    assert victim not in aborted
                    aborted.add(victim)
                assert harness.scheduler.abort(victim) is False

        for _ in range(400):
            if not harness.scheduler.has_work:
                break
            for schedule in (harness.scheduler.schedule_decode, harness.scheduler.schedule_prefill):
                maybe_abort()
                batch = schedule()
                if batch is not None:
                    maybe_abort()
                    harness.take_copies()
                    harness.finish_batch(batch)
                harness.pool.check_integrity()
        harness.assert_drained()
        for request in requests:
            for sequence in request.sequences:
                expected = expected_output(len(request.prompt_ids), request.max_new_tokens)
                if request.request_id in aborted:
                    assert sequence.finish_reason in ("abort", "length")
                    assert sequence.output_ids == expected[: len(sequence.output_ids)]
                else:
                    assert sequence.finish_reason == "length"
                    assert sequence.output_ids == expected
