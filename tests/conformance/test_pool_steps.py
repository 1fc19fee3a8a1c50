"""vLLM's cache manager with shortened steps beside its own, called as the scheduler calls it; no engine."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.conformance

SIZE = 4
LONGEST = 96


@pytest.fixture
def vllm(real, ask):
    """Return what the tests need of vLLM."""
    interface, request, torch = real("vllm.v1.kv_cache_interface"), real("vllm.v1.request"), real("torch")
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return SimpleNamespace(
        ask=partial(ask, size=SIZE),
        status=request.RequestStatus,
        manager=real("vllm.v1.core.kv_cache_manager").KVCacheManager,
        config=interface.KVCacheConfig,
        group=interface.KVCacheGroupSpec,
        full=lambda size=SIZE: interface.FullAttentionSpec(block_size=size, **shape),
        latent=lambda: interface.MLAAttentionSpec(block_size=SIZE, **shape),
        window=lambda window=10: interface.SlidingWindowSpec(block_size=SIZE, sliding_window=window, **shape),
        chunked=lambda: interface.ChunkedLocalAttentionSpec(block_size=SIZE, attention_chunk_size=8, **shape),
        state=lambda mode="none", size=SIZE: interface.MambaSpec(
            block_size=size, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode=mode
        ),
        metrics=real("vllm.v1.core.kv_cache_metrics").KVCacheMetricsCollector,
        pool=real("blocktable.integrations.vllm_pool"),
        steps=real("blocktable.integrations.vllm_pool_steps"),
        patches=real("blocktable.integrations._patches"),
    )


def make(vllm, specs, *, ours, blocks=40, drafts=False, size=SIZE, retention=None, log_stats=True, **given):
    """Return a manager, vLLM's own or ours."""
    if ours:
        vllm.pool.install()
    try:
        groups = [vllm.group([f"layer.{i}"], spec, is_eagle_group=drafts) for i, spec in enumerate(specs)]
        widest = max(spec.block_size for spec in specs) * given.get("dcp_world_size", 1)
        config = vllm.config(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention
        )
        return vllm.manager(
            config, max_model_len=LONGEST, scheduler_block_size=widest, hash_block_size=size, use_eagle=drafts,
            log_stats=log_stats, **given,
        )  # fmt: skip
    finally:
        if ours:
            vllm.patches.undo()


class Scheduler:
    """Requests that arrive, are cut into chunks, decode, are preempted, rolled back, aborted and finished, on both sides."""

    def __init__(self, vllm, sides, seed, *, lookahead=0, flight=0, external=False, whole=1):
        self.vllm, self.sides, self.draw = vllm, sides, random.Random(seed)  # noqa: S311 - test data
        self.lookahead, self.flight, self.external, self.whole = lookahead, flight, external, whole
        self.running, self.waiting, self.deferred = [], [], []
        self.preemptions = self.hits = self.unchanged = 0
        self.size = sides[0].block_pool.hash_block_size

    def both(self, name, *args, **named):
        """Call both managers and return what they gave, which is the same."""
        found = [getattr(side, name)(*args, **named) for side in self.sides]
        shown = [self.show(one) for one in found]
        assert shown[0] == shown[1], name
        return found

    def show(self, found):
        if isinstance(found, (tuple, list)):
            return [self.show(one) for one in found]
        if hasattr(found, "block_id"):
            return found.block_id
        if hasattr(found, "get_block_ids"):
            assert (found.get_block_ids(allow_none=True) is None) == (not any(found.blocks))
            return found.get_block_ids(), [[block.block_hash for block in group] for group in found.blocks]
        return found

    def same(self):
        self.both("take_events")
        self.both("take_new_block_ids")
        self.both("take_boundary_state_offloads")
        for side, (_, retained) in zip(self.sides, self.both("take_kv_cache_block_copies"), strict=True):
            side.block_pool.free_blocks(retained)
        assert self.sides[0].usage == self.sides[1].usage
        for request in self.running:
            self.both("get_blocks", request.request_id)
            self.both("estimate_cached_tokens", request)
            self.both("get_block_ids_for_computed_tokens", request.request_id, request.num_computed_tokens)
        states = [
            (
                [block.block_id for block in side.block_pool.free_block_queue.get_all_free_blocks()],
                [(block.ref_cnt, block.block_hash, block.block_hash_num_tokens) for block in side.block_pool.blocks],
                [one.num_cached_block for one in side.coordinator.single_type_managers],
                [
                    {name: [block.block_id for block in row] for name, row in one.req_to_blocks.items()}
                    for one in side.coordinator.single_type_managers
                ],
            )
            for side in self.sides
        ]
        assert states[0] == states[1]
        ours = self.sides[1]
        rows = [row for one in ours.coordinator.single_type_managers for row in one.req_to_blocks.values()]
        ours.block_pool.check([*rows, *(row[1] for row in self.deferred)])

    def arrive(self):
        tokens = [self.draw.randrange(2) for _ in range(self.draw.randrange(1, 60))]
        if self.running and self.draw.random() < 0.6:
            tokens = list(self.draw.choice(self.running).all_token_ids)[:60] + tokens[:3]
        adapter = {"adapter": ("adapter", 1, "nowhere")}
        seen = {"images": [(self.draw.choice("ab"), self.draw.randrange(12), 6)]}
        beside = self.draw.choice([{}] * 5 + [{"salt": "s"}, adapter, seen])
        request = self.vllm.ask(tokens[:60], size=self.size, **beside)
        request.kv_cache_report_mode = self.draw.choice(["full", "incremental"])  # of blocks that were hit, too
        request.skip_reading_prefix_cache = self.draw.random() < 0.1  # as those do that want their prompt's logprobs
        self.waiting.append(request)

    def chunk(self, left, most):
        """Return how many of the tokens that are left a step computes; where states are kept it ends with a block."""
        return min(left, -(-self.draw.randrange(1, most) // self.whole) * self.whole)

    def admit(self):
        if not self.waiting:
            return
        request = self.waiting[0]
        blocks, hits, boundary = zip(*self.both("get_computed_blocks", request), strict=True)
        external, named = 0, {}
        if self.external and self.draw.random() < 0.3:
            whole = (request.num_tokens - 1) // self.size * self.size
            external = max(0, self.draw.randrange(whole // self.size + 1) * self.size - hits[0])
            named = {"num_external_computed_tokens": external, "delay_cache_blocks": external > 0}
        request.shared_prefix_boundary = boundary[0]
        left = request.num_tokens - hits[0] - external
        new = self.chunk(left, 40)
        fit = {"full_sequence_must_fit": self.draw_fit, "has_scheduled_reqs": bool(self.running)}
        if self.place(request, new, blocks, hits[0], **fit, **named)[0] is not None:
            self.hits += hits[0]
            self.both("record_prefix_cache_stats", request, hits[0])
            request.num_computed_tokens = hits[0] + external + new
            request.status = self.vllm.status.RUNNING
            self.running.append(self.waiting.pop(0))
            self.sample(request, 0)
            if named.get("delay_cache_blocks") and self.draw.random() < 0.5:
                self.both("cache_blocks", request, hits[0] + external)

    def place(self, request, new, blocks, hits, **named):
        """Let both managers give a request that waits its slots: what each found of it, and new ones."""
        placed = [
            side.allocate_slots(
                request, new, num_new_computed_tokens=hits, new_computed_blocks=mine, num_lookahead_tokens=self.lookahead,
                **named,
            )
            for side, mine in zip(self.sides, blocks, strict=True)
        ]  # fmt: skip
        assert self.show(placed[0]) == self.show(placed[1])
        return placed

    draw_fit = False

    def step(self):
        """Let each running request compute what it has, or one token; who lacks blocks sends the last one away."""
        self.draw_fit = self.draw.random() < 0.3
        self.both("new_step_starts")
        at = 0
        while at < len(self.running):
            request = self.running[at]
            new = self.chunk(request.num_tokens - request.num_computed_tokens, 30)
            drafts = self.draw.randrange(self.lookahead + 1)
            new = min(new + drafts, LONGEST - request.num_computed_tokens)
            request.num_in_flight_tokens = min(self.flight, request.num_computed_tokens)
            while (found := self.both("allocate_slots", request, new, num_lookahead_tokens=self.lookahead))[0] is None:
                gone = self.running[-1]
                self.preempt(gone)
                if gone is request:
                    break
            if found[0] is not None:
                request.num_computed_tokens += new
                self.unchanged += not any(found[0].blocks)
                self.sample(request, drafts)
            at += 1
        self.same()

    def sample(self, request, drafts):
        if request.num_computed_tokens < request.num_tokens:
            return
        accepted = self.draw.randrange(drafts + 1)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens + accepted)
        while request.num_tokens <= request.num_computed_tokens and request.num_tokens < LONGEST:
            request.append_output_token_ids(self.draw.randrange(2))

    def preempt(self, request):
        self.running.remove(request)
        self.leave(request)
        self.preemptions += 1
        request.status, request.num_computed_tokens = self.vllm.status.PREEMPTED, 0
        self.waiting.insert(0, request)

    def leave(self, request):
        if self.flight and self.draw.random() < 0.5:
            self.deferred.append(self.both("pop_blocks_for_free", request))
            if self.draw.random() < 0.7:
                self.drain()
        else:
            self.both("free", request)

    def drain(self):
        for blocks in self.deferred:
            for side, row in zip(self.sides, blocks, strict=True):
                side.block_pool.free_blocks(reversed(row))
        self.deferred.clear()

    def play(self, steps):
        for _ in range(steps):
            if self.draw.random() < 0.5:
                self.arrive()
            if self.draw.random() < 0.7:
                self.admit()
            self.step()
            for request in [one for one in self.running if one.num_tokens >= LONGEST - 2 or self.draw.random() < 0.03]:
                self.running.remove(request)
                self.leave(request)
            if self.draw.random() < 0.05:
                self.both("evict_blocks", {self.draw.randrange(1, 20)})
            if self.draw.random() < 0.03:
                self.drain()
                while self.running:
                    self.preempt(self.running[-1])
                self.drain()
                assert self.both("reset_prefix_cache") == [True, True]
            if self.draw.random() < 0.1:
                self.drain()
        for request in self.running:
            self.both("free", request)
        self.drain()
        self.same()
        stats = [side.make_prefix_cache_stats() for side in self.sides]
        assert stats[0] == stats[1]
        pool = self.sides[1].block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


# name: groups, what the manager is told, what the scheduler does, whether steps are shortened
CASES = {
    "full": (lambda v: [v.full()], {}, {}, True),
    "latent": (lambda v: [v.latent()], {}, {"flight": 1}, True),
    "no caching": (lambda v: [v.full()], {"enable_caching": False}, {}, True),
    "no statistics": (lambda v: [v.full()], {"log_stats": False}, {}, True),
    "context parallel": (lambda v: [v.full()], {"dcp_world_size": 2, "size": 2 * SIZE}, {}, True),
    "drafts": (lambda v: [v.full()], {"drafts": True}, {"lookahead": 3}, True),
    "drafts of several steps": (lambda v: [v.full()], {"drafts": True, "num_prefill_lookahead": 3}, {"lookahead": 3}, True),
    "drafts in a window": (lambda v: [v.window()], {"drafts": True}, {"lookahead": 3, "flight": 1}, True),
    "drafts, full and window": (lambda v: [v.full(), v.window()], {"drafts": True, "blocks": 60}, {"lookahead": 3}, True),
    "drafts, wide and narrow": (lambda v: [v.full(8), v.window(4)], {"drafts": True, "blocks": 60}, {"lookahead": 3}, False),
    "lookahead": (lambda v: [v.full()], {}, {"lookahead": 5, "flight": 4}, True),
    "events": (lambda v: [v.full()], {"enable_kv_cache_events": True}, {}, True),
    "watermark": (lambda v: [v.full()], {"watermark": 0.2}, {}, True),
    "window": (lambda v: [v.window()], {}, {}, True),
    "window in flight": (lambda v: [v.window()], {}, {"flight": 3, "lookahead": 2}, True),
    "window of one block": (lambda v: [v.window(4)], {"enable_caching": False}, {}, True),
    "window of which little stays": (lambda v: [v.window()], {"retention": 8}, {}, True),
    "window of which the last stays": (lambda v: [v.window()], {"retention": 0}, {"lookahead": 2}, True),
    "window and full": (lambda v: [v.full(), v.window()], {"blocks": 60}, {"flight": 1}, True),
    "window of which little stays, and full": (lambda v: [v.full(), v.window()], {"blocks": 60, "retention": 16}, {}, True),
    "window and full, admitted by what is in flight": (
        lambda v: [v.full(), v.window()], {"blocks": 40, "max_in_flight_tokens": 40}, {"flight": 2}, True),
    "full, full and window": (lambda v: [v.full(), v.window(6), v.window(13)], {"blocks": 80, "enable_kv_cache_events": True}, {}, True),
    "loads from outside": (lambda v: [v.full()], {}, {"external": True}, True),
    "loads into a window": (lambda v: [v.window()], {}, {"external": True, "flight": 1}, True),
    "loads into three groups": (lambda v: [v.full(), v.window(), v.window()], {"blocks": 80}, {"external": True}, True),
    "wide and narrow": (lambda v: [v.full(8), v.window()], {"blocks": 60}, {}, False),
    "chunked": (lambda v: [v.chunked()], {}, {}, False),
    "states": (lambda v: [v.full(), v.state()], {"enable_caching": False, "blocks": 60}, {}, False),
    "states, kept": (lambda v: [v.full(), v.state("all")], {"blocks": 60}, {"whole": SIZE}, False),
    "states, the last of each chunk": (
        lambda v: [v.full(), v.state("align")], {"blocks": 60}, {"whole": SIZE, "lookahead": 2}, False),
    "states, the last of each prompt": (
        lambda v: [v.full(), v.state("align")], {"blocks": 60, "retention": 0}, {"whole": SIZE}, False),
    "states within a block": (lambda v: [v.full(), v.state("align", 2 * SIZE)], {"blocks": 60}, {"whole": SIZE}, False),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES)
def test_shortened_steps_give_and_leave_the_same_as_vllms(vllm, case, seed):
    specs, given, how, short = CASES[case]
    sides = [make(vllm, specs(vllm), ours=ours, **{"blocks": 30} | given) for ours in (False, True)]
    assert (vllm.steps.why_not(sides[1]) == "") == short or "allocate_slots" in vars(sides[1])
    assert ("allocate_slots" in vars(sides[1])) == short
    played = Scheduler(vllm, sides, seed, **how)
    played.play(150)
    assert played.preemptions > 0
    assert played.unchanged > 40
    assert played.hits > 0 or given.get("retention") == 0 or not given.get("enable_caching", True)


@pytest.fixture
def managers(vllm):
    """Return a function that makes both managers; its `Scheduler` calls them one after the other."""

    def both(*specs, **given):
        return Scheduler(vllm, [make(vllm, specs, ours=ours, **given) for ours in (False, True)], 0)

    return both


def start(pair, request, new=None):
    """Look a prompt up and give it slots: return the tokens that were cached, and the new blocks or None."""
    blocks, hits, _ = zip(*pair.both("get_computed_blocks", request), strict=True)
    new = request.num_tokens - hits[0] if new is None else new
    found = pair.place(request, new, blocks, hits[0])
    if found[0] is not None:
        request.num_computed_tokens, request.status = hits[0] + new, pair.vllm.status.RUNNING
    return hits[0], found[0] and found[0].get_block_ids()


def owners(pair, numbers):
    return [pair.sides[1].block_pool.blocks[number].ref_cnt for number in numbers]


def free(pair):
    return [block.block_id for block in pair.sides[1].block_pool.free_block_queue.get_all_free_blocks()]


COMMON = [0] * SIZE + [1] * SIZE + [2] * SIZE  # three blocks


def test_a_prompt_is_placed_hit_given_back_and_evicted_in_order(vllm, managers):
    pair = managers(vllm.full(), blocks=11)
    one, two, three = (vllm.ask(COMMON + tail) for tail in ([3] * 3, [3] * 1, [3] * 2))
    assert start(pair, one) == (0, ([1, 2, 3, 4],))
    assert start(pair, two) == (3 * SIZE, ([5],))
    assert owners(pair, range(1, 6)) == [2, 2, 2, 1, 1]
    pair.both("free", one)
    pair.both("free", two)
    assert free(pair) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert start(pair, three) == (3 * SIZE, ([5],))
    pair.both("free", three)
    assert start(pair, vllm.ask([9] * SIZE * 10)) == (0, ([5, 4, 6, 7, 8, 9, 10, 3, 2, 1],))
    assert start(pair, vllm.ask([8])) == (0, None)
    pair.same()


def test_a_request_that_decodes_takes_a_block_when_it_needs_one_and_full_ones_are_found(vllm, managers):
    pair = managers(vllm.full(), blocks=11)
    request = vllm.ask([*COMMON, 3, 3])
    start(pair, request)
    came, known = [], []
    for _ in range(2 * SIZE):
        request.append_output_token_ids(7)
        (found, _) = pair.both("allocate_slots", request, 1)
        came += [number for group in found.get_block_ids() for number in group]
        request.num_computed_tokens += 1
        known.append(sum(block.block_hash is not None for block in pair.sides[1].block_pool.blocks))
    assert came == [5, 6]
    assert known == [3, 4, 4, 4, 4, 5, 5, 5]
    whole = vllm.ask(list(request.all_token_ids))
    assert start(pair, whole) == (5 * SIZE, ([7],))


def test_a_block_taken_again_is_found_no_more(vllm, managers):
    pair = managers(vllm.full(), blocks=2)
    request = vllm.ask([1] * SIZE)
    assert start(pair, request) == (0, ([1],))
    pair.both("free", request)
    assert start(pair, vllm.ask([1] * (SIZE - 1))) == (0, ([1],))
    assert pair.sides[1].block_pool.blocks[1].block_hash is None


def test_hits_of_a_prompt_that_does_not_fit_are_left_as_they_were(vllm, managers):
    pair = managers(vllm.full(), blocks=11)
    longer = vllm.ask(COMMON * 2)
    assert start(pair, vllm.ask(COMMON)) == (0, ([1, 2, 3],))
    assert start(pair, longer) == (3 * SIZE, ([4, 5, 6],))
    pair.both("free", longer)
    assert start(pair, vllm.ask([7] * SIZE * 2)) == (0, ([7, 8],))
    # Six blocks are found, of which three are among the five free ones; three more are needed.
    assert start(pair, vllm.ask(COMMON * 3)) == (6 * SIZE, None)
    assert owners(pair, range(1, 7)) == [1, 1, 1, 0, 0, 0]
    assert free(pair) == [9, 10, 6, 5, 4]


def test_without_caching_nothing_is_found(vllm, managers):
    pair = managers(vllm.full(), blocks=5, enable_caching=False)
    request = vllm.ask([1] * 10)
    assert start(pair, request) == (0, ([1, 2, 3],))
    pair.both("free", request)
    assert start(pair, vllm.ask([1] * 16)) == (0, ([3, 2, 1, 4],))
    assert start(pair, vllm.ask([1] * 4)) == (0, None)


# Of a prompt of three full blocks, 1 to 3 of full attention and 5 to 7 of a window of two, these are forgotten.
@pytest.mark.parametrize(
    ("forgotten", "blocks"), [({5}, 3), ({1}, 0), ({3, 7}, 2), ({3}, 2), ({7}, 2), ({6}, 1), ({3, 5}, 0)]
)
def test_a_hit_ends_where_every_group_has_what_its_attention_reads(vllm, managers, forgotten, blocks):
    pair = managers(vllm.full(), vllm.window(2 * SIZE), blocks=21)
    request = vllm.ask([*COMMON, 3])
    assert start(pair, request) == (0, ([1, 2, 3, 4], [5, 6, 7, 8]))
    found, hits, _ = pair.both("get_computed_blocks", vllm.ask([*COMMON, 4]))[1]
    assert (found.get_block_ids(), hits) == (([1, 2, 3], [0, 6, 7]), 3 * SIZE)
    pair.both("free", request)
    pair.both("evict_blocks", forgotten)
    assert start(pair, vllm.ask([*COMMON, 5]))[0] == blocks * SIZE


def test_who_waits_is_held_to_the_watermark_even_with_room(vllm):
    sides = [make(vllm, [vllm.full()], ours=ours, blocks=12, watermark=0.5) for ours in (False, True)]
    request = vllm.ask([1] * 10)
    for side in sides:
        assert side.allocate_slots(request, 9, has_scheduled_reqs=False) is not None
        side.block_pool.get_new_blocks(4)
    request.num_computed_tokens = 9
    assert [side.allocate_slots(request, 1) for side in sides] == [None, None]
    request.status = vllm.status.RUNNING
    assert [side.allocate_slots(request, 1) is side.empty_kv_cache_blocks for side in sides] == [True, True]


def test_arguments_by_position_are_vllms(vllm):
    sides = [make(vllm, [vllm.full()], ours=ours) for ours in (False, True)]
    request = vllm.ask([1] * 10)
    given = [side.allocate_slots(request, 10, 0, side.empty_kv_cache_blocks, 7).get_block_ids() for side in sides]
    assert given == [([1, 2, 3, 4, 5],)] * 2
    request.num_computed_tokens, request.status = 10, vllm.status.RUNNING
    given = [side.allocate_slots(request, 1, 0, num_lookahead_tokens=12).get_block_ids() for side in sides]
    assert given == [([6],)] * 2


def test_a_manager_with_ways_of_its_own_is_left_as_it_is_and_named(vllm, monkeypatch):
    class Own(vllm.manager):
        def allocate_slots(self, *args, **kwargs):
            return super().allocate_slots(*args, **kwargs)

    monkeypatch.setattr(vllm, "manager", Own)
    assert vllm.steps.why_not(make(vllm, [vllm.full()], ours=True)) == "Own has an allocate_slots of its own"


def test_another_pool_stays_and_is_named(vllm, real, monkeypatch):
    stock = real("vllm.v1.core.block_pool").BlockPool
    coordinator = real("vllm.v1.core.kv_cache_coordinator")

    def install():
        vllm.patches.wrap(vllm.manager, "__init__", vllm.pool._initialize)

    monkeypatch.setattr(vllm.pool, "install", install)
    assert coordinator.BlockPool is stock
    manager = make(vllm, [vllm.full()], ours=True)
    assert "allocate_slots" not in vars(manager)
    monkeypatch.setenv("BLOCKTABLE_VLLM_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"the pool is a vllm\.v1\.core\.block_pool\.BlockPool"):
        make(vllm, [vllm.full()], ours=True)


def test_nothing_is_left_after_undoing(vllm, real):
    make(vllm, [vllm.full()], ours=True)
    assert type(make(vllm, [vllm.full()], ours=False).block_pool) is real("vllm.v1.core.block_pool").BlockPool
