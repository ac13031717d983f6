"""The ring against lists (random keys, shapes, verdicts, holds, memory limits), and its promises one by one."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_support import DEVICES, GPU, bits
from test_ring_slots import ListedSlots, assert_equal

from flightrec.errors import RingMemoryError
from flightrec.records import NO_MICROBATCH, Key, Phase, QuantizerInfo, Representation, Stage, Statistic
from flightrec.ring.layout import QuantizedParts
from flightrec.ring.ring import MICROBATCHES, POLICIES, Ring

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool]
SHAPES = [(), (0,), (3,), (4, 8), (16, 8), (4, 64), (300,)]


def key(layer="fc1", tensor="activation", **more):
    return Key(layer, tensor, **{"microbatch": 0, **more})


def parts_of(x, scale=2.0, device="cpu"):
    """``x`` in FP8 with one scale."""
    info = QuantizerInfo("test.Quantizer", "float8_e4m3fn", "multiply_to_encode", (), {"scale": "float32"})
    factor = torch.tensor(scale, device=device)
    data = (x.detach().float() * factor).clamp(-448, 448).to(E4M3)
    return QuantizedParts(info, {"data": data, "scale": factor}, pair_codes="data")


def step(ring, tick, fired=False, release=None):
    """What ``Recorder.step`` does with the ring."""
    ring.join()
    if not ring.committed:
        ring.commit()
    ring.advance(tick, torch.tensor(fired, device=ring.device), release)
    ring.begin(tick + 1)


def stored(ring, slot, layout):
    """Components of a record as bytes, from a slot."""
    areas = dict(ring.read_slot(slot))
    contents = {}
    for component in layout.components:
        start = layout.offset_bytes + component.offset_bytes
        contents[component.name] = areas[layout.segment][start : start + component.num_bytes].cpu().numpy().tobytes()
    return contents


def given_bytes(high_precision, quantized):
    tensors = {} if high_precision is None else {"high_precision": high_precision}
    tensors |= {} if quantized is None else quantized.components
    return {name: bits(tensor).tobytes() for name, tensor in tensors.items()}


class ListedRing:
    """What was recorded, in lists: by tick a list of (requested key, bytes, number of elements, kept)."""

    def __init__(self, ring):
        self.ring = ring
        self.ticks: dict[int, list] = {}

    def record(self, tick, wanted, high_precision, quantized, keep):
        taken = [entry[0] for entry in self.ticks.setdefault(tick, [])]
        call = wanted.call
        while Key(*[*_fields(wanted)[:5], call, wanted.stage]) in taken:
            call += 1
        expected = Key(*[*_fields(wanted)[:5], call, wanted.stage])
        layout = self.ring.record(wanted, high_precision=high_precision, quantized=quantized, keep=keep)
        assert layout.key == expected
        kept = given_bytes(
            high_precision if "high_precision" in keep else None, quantized if "quantized" in keep else None
        )
        numel = -1 if high_precision is None else high_precision.numel()
        self.ticks[tick].append((expected, kept, numel))
        return layout

    def check(self, tick):
        """Everything that the ring holds after the step of ``tick``."""
        ring = self.ring
        state = ring.slots.decode(ring.slots.state.cpu())
        for slot, held_tick in enumerate(state.slot_tick):
            if 0 <= held_tick <= tick:
                self._check_slot(slot, held_tick)

    def _check_slot(self, slot, tick):
        ring = self.ring
        layouts = [ring.layouts[number] for number in ring.index(tick).layout_ids]
        expected = self.ticks.get(tick, [])
        assert [layout.key for layout in layouts] == [entry[0] for entry in expected]
        for layout, (_, kept, _) in zip(layouts, expected, strict=True):
            if layout.representation is Representation.STATISTICS:
                assert layout.reason or not kept
                assert (layout.segment, layout.components) == (-1, ())
            else:
                assert stored(ring, slot, layout) == kept

    def check_statistics(self, tick):
        values, valid = self.ring.gather(tick)
        rows = {self.ring.layouts[number].row: entry for number, entry in zip(
            self.ring.index(tick).layout_ids, self.ticks.get(tick, []), strict=True)}  # fmt: skip
        assert set(valid.cpu().numpy().nonzero()[0]) == set(rows)
        for row, (_, _, numel) in rows.items():
            count = values[row, Statistic.NUMEL].item()
            assert count == numel if numel >= 0 else np.isnan(count)


def _fields(wanted):
    return [wanted.layer, wanted.tensor, wanted.part, wanted.microbatch, wanted.phase, wanted.call, wanted.stage]


def random_record(rng):
    """(key, shape, dtype, what is given, keep, strided)."""
    wanted = Key(
        rng.choice(["a", "b", ""]),
        rng.choice(["activation", "gradient"]),
        microbatch=rng.choice([NO_MICROBATCH, 0, 1, 2]),
        call=rng.choice([0, 0, 0, 1]),
    )
    keep = rng.choice([("high_precision", "quantized")] * 3 + [("high_precision",), ("quantized",), ("statistics",)])
    given_parts = rng.choice(["high_precision", "quantized", "both"])
    return wanted, rng.choice(SHAPES), rng.choice(DTYPES), given_parts, frozenset(keep), rng.random() < 0.3


def tensors_for(record, generator, device):
    _, shape, dtype, given_parts, _, strided = record
    if given_parts != "high_precision" and not dtype.is_floating_point:
        dtype = torch.float32
    x = (torch.randn(tuple(reversed(shape)) if strided else shape, generator=generator) * 3).to(dtype).to(device)
    x = x.permute(*range(x.dim() - 1, -1, -1)) if strided and x.dim() else x
    quantized = None if given_parts == "high_precision" else parts_of(x, device=device)
    return (None if given_parts == "quantized" else x), quantized


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=200, deadline=None)
@given(
    iterations=st.integers(1, 4),
    after=st.integers(0, 2),
    latency=st.integers(1, 2),
    memory_bytes=st.sampled_from([0, 3000, 20_000, 60_000, 1 << 24]),
    microbatches=st.sampled_from(MICROBATCHES),
    policy=st.sampled_from([policy for policy in POLICIES if policy != "error"]),
    first=st.sampled_from([0, 100]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_histories_against_lists(
    device, iterations, after, latency, memory_bytes, microbatches, policy, first, seed
):
    ring = Ring(
        device, iterations=iterations, after=after, latency=latency, memory_bytes=memory_bytes,
        on_out_of_memory=policy, microbatches=microbatches,
    )  # fmt: skip
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = [random_record(rng) for _ in range(rng.randint(1, 10))]
    model, listed, release_at = ListedRing(ring), None, {}
    ring.begin(first)
    for tick in range(first, first + rng.randint(2, 14)):
        for record in rng.choices(pool, k=rng.randint(0, 8)):
            high_precision, quantized = tensors_for(record, generator, device)
            model.record(tick, record[0], high_precision, quantized, record[4])
        ring.join()
        if not ring.committed:
            ring.commit()
            assert ring.iterations <= iterations
            assert policy == "fewer_iterations" or ring.iterations == iterations
            assert ring.num_slots == ring.iterations + after + latency
            listed = ListedSlots(ring.num_slots, ring.iterations, after, first)
        model.check_statistics(tick)
        release = releases(listed, release_at, tick, rng)
        fired = rng.random() < 0.3
        listed.advance(tick, fired, release)
        ring.advance(tick, torch.tensor(fired, device=device), torch.tensor(release, device=device))
        assert_equal(ring.slots, listed, tick)
        model.check(tick)
        ring.begin(tick + 1)
        assert sum(area.numel() for _, area in ring.read_slot(0)) * (ring.num_slots + 1) <= memory_bytes
    if microbatches == "all" and memory_bytes == 1 << 24:
        assert not any(layout.reason for layout in ring.layouts)


def releases(listed, release_at, tick, rng):
    """By slot the held tick that the host gives back now: each is staged for some ticks."""
    release = [-1] * listed.num_slots
    for slot, (held_tick, held) in enumerate(listed.slots):
        if held and release_at.setdefault(held_tick, tick + rng.randint(0, 4)) <= tick:
            release[slot] = held_tick
            del release_at[held_tick]
    return release


# -- promises, one by one


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_are_constant_and_nothing_moves(device):
    ring = Ring(device, iterations=2, memory_bytes=1 << 24)
    x = torch.randn(8, 8, device=device)
    ring.begin(0)
    seen = {}
    for tick in range(12):
        for layer in ("a", "b", f"late{tick}"):
            layout = ring.record(key(layer), high_precision=x)
            assert seen.setdefault(layer, layout) is layout
        step(ring, tick)
    assert len(ring.layouts) == 14
    assert [layout.layout_id for layout in ring.layouts] == list(range(14))


def test_changing_shapes_use_few_places():
    ring = Ring("cpu", iterations=2, memory_bytes=1 << 26)
    ring.begin(0)
    places = set()
    for tick, rows in enumerate([5, 9, 3, 0, 7, 9, 5, 1000, 9, 1200, 5]):
        layout = ring.record(key(), high_precision=torch.full((rows, 64), float(tick)))
        assert layout.shape == (rows, 64)
        assert layout.row == 0
        places.add((layout.segment, layout.offset_bytes))
        step(ring, tick)
    assert len(places) <= 4
    assert len(ring.layouts) == 7  # one a shape
    slot = int(ring.slot_view(10))
    assert set(np.frombuffer(stored(ring, slot, layout)["high_precision"], np.float32)) == {10.0}


def test_first_iteration_fault_is_held():
    ring = Ring("cpu", iterations=4, memory_bytes=1 << 24)
    ring.begin(0)
    layout = ring.record(key(), high_precision=torch.tensor([1.0, float("nan")]))
    ring.commit()
    values, valid = ring.gather(0)
    assert values[layout.row, Statistic.NAN_COUNT] == 1
    ring.advance(0, values[:, Statistic.NAN_COUNT].gt(0).logical_and(valid).any())
    for tick in range(1, 20):
        ring.begin(tick)
        ring.record(key(), high_precision=torch.zeros(2))
        ring.advance(tick)
    state = ring.slots.decode(ring.slots.state)
    assert state.held[state.slot_of(0)]
    assert np.isnan(np.frombuffer(stored(ring, state.slot_of(0), layout)["high_precision"], np.float32)[1])


def test_copies_are_of_the_time_of_record():
    """F32: aliases, views of a bucket, in-place changes afterwards."""
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    bucket = torch.full((3,), float("nan"))
    base = torch.arange(12.0).reshape(3, 4)
    layouts = [
        ring.record(key("bucket"), high_precision=bucket[1:]),
        ring.record(key("t"), high_precision=base.t()),
        ring.record(key("strided"), high_precision=base[::2]),
        ring.record(key("expanded"), high_precision=torch.ones(1).expand(1000)),
    ]
    bucket.zero_()
    base.zero_()
    step(ring, 0)
    arrays = [np.frombuffer(stored(ring, 0, layout)["high_precision"], np.float32) for layout in layouts]
    assert np.isnan(arrays[0]).all()
    assert arrays[1].tolist() == np.arange(12.0).reshape(3, 4).T.ravel().tolist()
    assert arrays[2].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert arrays[3].tolist() == [1.0] * 1000


def test_all_codes_survive_bit_for_bit():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 24)
    ring.begin(0)
    all_bytes = torch.arange(256, dtype=torch.uint8)
    words = torch.arange(-32768, 32768, dtype=torch.int16)
    tensors = [words.view(torch.bfloat16), words.view(torch.float16)]
    tensors += [all_bytes.view(getattr(torch, name)) for name in
                ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
                 "float4_e2m1fn_x2")]  # fmt: skip
    info = QuantizerInfo("test", "", "none", (), {})
    layouts = [
        ring.record(key(str(number)), quantized=QuantizedParts(info, {"data": tensor}))
        for number, tensor in enumerate(tensors)
    ]
    step(ring, 0)
    for layout, tensor in zip(layouts, tensors, strict=True):
        expected = (words if tensor.dtype.itemsize == 2 else all_bytes).numpy().tobytes()
        assert stored(ring, 0, layout)["data"] == expected
        assert layout.components[0].format == str(tensor.dtype).removeprefix("torch.")


def test_quantizers_are_told_apart_once():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    x = torch.ones(4, 4)
    for _ in range(3):
        ring.record(key(), high_precision=x, quantized=parts_of(x))
    other = QuantizerInfo("test.Quantizer", "float8_e4m3fn", "multiply_to_encode", (), {"scale": "other"})
    layout = ring.record(key("b"), quantized=QuantizedParts(other, parts_of(x).components))
    assert len(ring.quantizers) == 2
    assert ring.quantizers[layout.quantizer] is other
    assert ring.quantizer_id(other) == layout.quantizer
    assert [ring.layouts[number].key.call for number in ring.index(0).layout_ids] == [0, 1, 2, 0]


def test_a_changed_quantizer_is_a_new_layout_in_the_same_place():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    x = torch.ones(4, 4)
    first = ring.record(key(), quantized=parts_of(x))
    step(ring, 0)
    info = QuantizerInfo("other", "float8_e4m3fn", "multiply_to_encode", (), {})
    second = ring.record(key(), quantized=QuantizedParts(info, parts_of(x).components))
    assert second.layout_id != first.layout_id
    assert (second.segment, second.offset_bytes, second.row) == (first.segment, first.offset_bytes, first.row)


def test_representation_follows_keep():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    x = torch.ones(4, 4)
    kept = {
        word: ring.record(
            key(word), high_precision=x, quantized=parts_of(x), keep=frozenset(word.split())
        ).representation
        for word in ("high_precision", "quantized", "high_precision quantized", "statistics", "")
    }
    assert list(kept.values()) == [
        Representation.HIGH_PRECISION, Representation.QUANTIZED, Representation.BOTH, Representation.STATISTICS,
        Representation.STATISTICS,
    ]  # fmt: skip
    step(ring, 0)
    values, valid = ring.gather(0)
    assert int(valid.sum()) == 5
    assert (values[valid][:, Statistic.QUANTIZED_NUMEL] == 16).all()
    assert (values[valid][:, Statistic.SQUARED_ERROR] == 0).all()


def test_layouts_are_announced_once_in_order():
    told = []
    ring = Ring("cpu", iterations=1, memory_bytes=40_000, microbatches="last", on_layout=told.append)
    ring.begin(0)
    for tick in range(3):
        for microbatch in range(2):
            ring.record(key(microbatch=microbatch), high_precision=torch.ones(1000))
        step(ring, tick)
    assert told == ring.layouts


def test_what_cannot_be_copied_says_why_and_leaves_no_statistics():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    layouts = [
        ring.record(key("meta"), high_precision=torch.ones(2, device="meta")),
        ring.record(key("sparse"), high_precision=torch.eye(2).to_sparse()),
        ring.record(key("nothing")),
    ]
    assert [layout.reason.split()[0] for layout in layouts] == ["the", "a", "nothing"]
    step(ring, 0)
    assert not ring.gather(0)[1].any()


def test_old_indexes_are_forgotten():
    ring = Ring("cpu", iterations=1, memory_bytes=0)
    ring.begin(0)
    for tick in range(100):
        step(ring, tick)
    assert ring.index(100).layout_ids == []
    assert ring.index(40).tick == 40
    with pytest.raises(KeyError):
        ring.index(30)


# -- memory


def sized(ring, tick=0, num_microbatches=3):
    """One iteration of 1 KiB and 8 KiB tensors."""
    for microbatch in range(num_microbatches):
        for layer, count in (("small", 256), ("large", 2048)):
            value = float(100 * tick + 10 * microbatch + (layer == "large"))
            ring.record(key(layer, microbatch=microbatch), high_precision=torch.full((count,), value))


def contents(ring, tick):
    """(layer, microbatch) -> value of what is held with its bytes."""
    slot = ring.slots.decode(ring.slots.state).slot_of(tick)
    layouts = [ring.layouts[number] for number in ring.index(tick).layout_ids]
    found = {}
    for layout in layouts:
        if layout.components:
            values = np.frombuffer(stored(ring, slot, layout)["high_precision"], np.float32)
            assert len(set(values)) == 1
            found[layout.key.layer, layout.key.microbatch] = float(values[0])
    return found


def run_sized(memory_bytes, num_ticks=5, **more):
    ring = Ring("cpu", iterations=2, after=1, latency=1, memory_bytes=memory_bytes, **more)  # 5 slots with scrap
    ring.begin(0)
    held = []
    for tick in range(num_ticks):
        sized(ring, tick)
        if not ring.committed:
            ring.commit()
        held.append(contents(ring, tick))
        step(ring, tick)
    return ring, held


WHOLE = 3 * (1024 + 8192)


def everything(tick):
    return {
        (layer, microbatch): 100.0 * tick + 10 * microbatch + (layer == "large")
        for microbatch in range(3)
        for layer in ("small", "large")
    }


def only(held, wanted):
    return {name: value for name, value in held.items() if wanted(*name)}


def test_everything_fits():
    ring, held = run_sized(5 * WHOLE, on_out_of_memory="error")
    assert held == [everything(tick) for tick in range(5)]
    assert ring.bytes_per_iteration == WHOLE
    assert sum(area.numel() for _, area in ring.read_slot(0)) == WHOLE
    assert "3 more" not in ring.summary()
    assert [(row.layer, row.what) for row in ring.contributors()] == [("large", "kept"), ("small", "kept")]
    assert sum(row.share for row in ring.contributors()) == pytest.approx(1)


def test_statistics_only_leaves_out_the_largest():
    ring, held = run_sized(5 * WHOLE - 1, on_out_of_memory="statistics_only")
    assert held == [only(everything(tick), lambda layer, _: layer == "small") for tick in range(5)]
    reasons = {layout.key.layer: layout.reason for layout in ring.layouts[6:]}
    assert "ring.memory" in reasons["large"]
    assert "statistics only" in ring.summary()
    assert [(row.layer, row.what == "kept") for row in ring.contributors()] == [("large", False), ("small", True)]


def test_fewer_iterations_says_so():
    ring, held = run_sized(4 * WHOLE, on_out_of_memory="fewer_iterations")
    assert held == [everything(tick) for tick in range(5)]
    assert (ring.iterations, ring.num_slots) == (1, 3)
    assert "1 instead of 2 iterations" in ring.summary()


def test_fewer_microbatches_keeps_the_first():
    ring, held = run_sized(5 * WHOLE // 2, on_out_of_memory="fewer_microbatches")
    assert held == [only(everything(tick), lambda _, microbatch: microbatch == 0) for tick in range(5)]
    assert "microbatches: first" in ring.summary()


@pytest.mark.parametrize(
    ("microbatches", "kept"),
    [("first", lambda tick: 0), ("last", lambda tick: 2), ("rotate", lambda tick: tick % 3)],
)
def test_microbatches_setting(microbatches, kept):
    ring, held = run_sized(5 * WHOLE, microbatches=microbatches, on_out_of_memory="error")
    assert held == [only(everything(t), lambda _, microbatch, t=t: microbatch == kept(t)) for t in range(5)]
    assert ring.bytes_per_iteration == WHOLE // 3
    assert any(microbatches in layout.reason for layout in ring.layouts)


def test_rotation_takes_no_turns_with_records_without_a_microbatch():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20, microbatches="rotate")
    ring.begin(0)
    for tick in range(4):
        for microbatch in (NO_MICROBATCH, 0, 1):
            ring.record(key(microbatch=microbatch), high_precision=torch.full((3,), float(microbatch)))
        ring.commit()
        assert contents(ring, tick) == {("fc1", NO_MICROBATCH): -1.0, ("fc1", tick % 2): tick % 2}
        step(ring, tick)


def test_rotation_of_one_microbatch():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20, microbatches="rotate")
    ring.begin(0)
    for tick in range(4):
        assert ring.record(key(microbatch=NO_MICROBATCH), high_precision=torch.ones(3)).components
        if tick:  # more microbatches than the first iteration had: the others get no turn
            assert not ring.record(key(microbatch=1), high_precision=torch.ones(3)).components
        step(ring, tick)


def test_error_names_the_largest_contributors():
    with pytest.raises(RingMemoryError, match=r"ring\.memory: 5 slots of 27\.0 KiB.*\n(.*\n)*.*large activation x3"):
        run_sized(5 * WHOLE - 1, on_out_of_memory="error")


def test_late_keys_take_what_is_left_then_say_that_it_is_full():
    ring, _ = run_sized(5 * WHOLE + 5 * 1024)
    layout = ring.record(key("late"), high_precision=torch.ones(256))
    assert layout.components
    layout = ring.record(key("later"), high_precision=torch.ones(256))
    assert layout.representation is Representation.STATISTICS
    assert "full" in layout.reason


def test_no_memory_at_all_still_gives_statistics():
    ring, held = run_sized(0)
    assert held == [{}] * 5
    sized(ring, 5)
    assert int(ring.gather(5)[1].sum()) == 6


def test_refused_memory_degrades_instead_of_raising():
    """A real refusal: the process may not have more address space."""
    code = """
        import resource, torch
        from flightrec.records import Key
        from flightrec.ring.ring import Ring
        torch.set_num_threads(1)
        ring = Ring("cpu", iterations=8, memory_bytes=1 << 34, on_out_of_memory="statistics_only")
        ring.begin(0)
        x, y = torch.full((1 << 24,), 3.0), torch.full((1 << 20,), 5.0)
        ring.record(Key("large", "activation"), high_precision=x)
        ring.record(Key("small", "activation"), high_precision=y)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
        ring.commit()
        layouts = [ring.layouts[number] for number in ring.index(0).layout_ids]
        print([(layout.key.layer, bool(layout.components)) for layout in layouts])
        small = layouts[1]
        area = dict(ring.read_slot(0))[small.segment][small.offset_bytes:][: 4 << 20].view(torch.float32)
        print(ring.committed, ring.num_slots, bool((area == 5.0).all()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout.splitlines() == ["[('large', False), ('small', True)]", "True 11 True"], run.stderr


# -- callers


@pytest.mark.parametrize("device", DEVICES)
def test_every_mode_of_the_caller(device):
    """F19 too: unwritten slots under deterministic algorithms are never valid."""
    modes = [
        torch.inference_mode(),
        torch.no_grad(),
        torch.autocast(device, dtype=torch.bfloat16),
        torch.enable_grad(),
    ]
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode():
            ring = Ring(device, iterations=2, memory_bytes=1 << 22)
            ring.begin(0)
        x = torch.randn(8, 8, device=device)
        for tick in range(12):
            with modes[tick % 4]:
                leaf = x.clone().requires_grad_() if tick % 4 == 3 else x * 1
                ring.record(key(), high_precision=leaf, quantized=parts_of(x, device=device))
                ring.record(key(f"late{tick}"), high_precision=leaf)
                if tick == 0:
                    ring.commit()
                values, valid = ring.gather(tick)
                assert valid.sum() == 2
                assert not values.requires_grad
                step(ring, tick)
        layout = ring.layouts[ring.index(11).layout_ids[0]]
        assert stored(ring, int(ring.slot_view(11)), layout)["high_precision"] == bits(x).tobytes()
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_of_the_graph_is_held():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 22)
    ring.begin(0)
    weight = torch.randn(8, 8, requires_grad=True)
    for tick in range(3):
        product = weight * 2
        version = product._version
        ring.record(key(), high_precision=product)
        ring.record(key("w"), high_precision=weight)
        assert product._version == version
        alive = weakref.ref(product)
        del product
        gc.collect()
        assert alive() is None
        step(ring, tick)
    assert not any(area.requires_grad for _, area in ring.read_slot(0))
    assert weight._version == 0


def test_two_threads_record_at_once():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 24)
    ring.begin(0)
    step(ring, 0)

    def work(number):
        for count in range(200):
            ring.record(key("shared"), high_precision=torch.full((50,), float(number)))
            ring.record(key(f"own{number}"), high_precision=torch.full((50,), float(count)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    layouts = [ring.layouts[number] for number in ring.index(1).layout_ids]
    assert len(layouts) == 1200
    assert len({layout.row for layout in layouts}) == 1200
    slot = int(ring.slot_view(1))
    for layout in layouts:
        values = np.frombuffer(stored(ring, slot, layout)["high_precision"], np.float32)
        assert len(set(values)) == 1
        if layout.key.layer != "shared":
            assert values[0] == layout.key.call


def test_begin_commits_what_was_forgotten():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    ring.record(key(), high_precision=torch.ones(2))
    ring.begin(1)
    assert ring.committed
    assert ring.num_slots == 4


def test_keys_differ_in_every_field():
    ring = Ring("cpu", iterations=1, memory_bytes=1 << 20)
    ring.begin(0)
    keys = [
        key(), key("b"), key(tensor="output"), key(part="x"), key(microbatch=1), key(phase=Phase.EVAL), key(call=1),
        key(stage=Stage.BACKWARD),
    ]  # fmt: skip
    layouts = [ring.record(wanted, high_precision=torch.ones(2)) for wanted in keys]
    assert [layout.key for layout in layouts] == keys
    assert len({(layout.offset_bytes, layout.row) for layout in layouts}) == len(keys)


# -- CUDA


@pytest.mark.gpu
@GPU
def test_no_synchronisation_in_steady_state():
    ring = Ring("cuda", iterations=2, memory_bytes=1 << 26)
    x = torch.randn(256, 256, device="cuda")
    quantized = parts_of(x, device="cuda")
    rows = torch.tensor(100, device="cuda")
    fired, release = torch.tensor(False, device="cuda"), torch.full((5,), -1, device="cuda")
    ring.begin(0)
    for tick in range(20):
        if tick == 3:
            torch.cuda.set_sync_debug_mode("error")
        ring.record(key(), high_precision=x, quantized=quantized, valid_rows=rows)
        ring.record(key("t"), high_precision=x.t(), valid_rows=7)
        ring.join()
        if tick == 0:
            ring.commit()
        ring.gather(tick)
        ring.advance(tick, fired, release, fired)
        ring.begin(tick + 1)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@GPU
def test_memory_is_flat_between_ticks():
    ring = Ring("cuda", iterations=2, memory_bytes=1 << 26)
    x = torch.randn(256, 256, device="cuda")
    fired = torch.tensor(False, device="cuda")
    ring.begin(0)
    seen = set()
    for tick in range(30):
        ring.record(key(), high_precision=x, quantized=parts_of(x, device="cuda"))
        ring.join()
        ring.commit()
        ring.advance(tick, fired)
        ring.begin(tick + 1)
        if tick >= 3:
            seen.add(torch.cuda.memory_allocated())
    assert len(seen) == 1


@pytest.mark.gpu
@GPU
def test_records_of_other_streams_are_waited_for():
    ring = Ring("cuda", iterations=2, memory_bytes=1 << 28)
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device="cuda")
    ring.begin(0)
    for tick in range(12):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # the record comes long after the host is done with it
            x.fill_(tick + 1)
            layout = ring.record(key(), high_precision=x)
        ring.join()
        ring.commit()
        values, valid = ring.gather(tick)
        amax, is_valid = values[layout.row, Statistic.AMAX].clone(), valid[layout.row].clone()
        ring.advance(tick, torch.tensor(False, device="cuda"))
        ring.begin(tick + 1)
        torch.cuda.current_stream().wait_stream(side)
        assert (amax.item(), is_valid.item()) == (tick + 1, True)


@pytest.mark.gpu
@GPU
def test_refused_device_memory_degrades():
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    x = torch.full((1 << 26,), 2.0, device="cuda")  # 256 MiB
    ring = Ring("cuda", iterations=8, memory_bytes=1 << 40, on_out_of_memory="fewer_iterations")
    ring.begin(0)
    ring.record(key(), high_precision=x)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + (2 << 30)) / total))
    try:
        ring.commit()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ring.committed
    assert ring.iterations < 8
    assert ring.layouts[ring.index(0).layout_ids[0]].reason or ring.bytes_per_iteration == 1 << 28
